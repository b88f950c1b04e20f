"""Weights that change after compilation, and that are read through views.

`CHECKS` has all checks by name; see `semantics`.
"""

from collections.abc import Callable

from dynamo_backends.conformance.subject import Subject
from dynamo_backends.conformance.weights import changes, views

CHECKS: dict[str, Callable[[Subject], None]] = {**changes.CHECKS, **views.CHECKS}
