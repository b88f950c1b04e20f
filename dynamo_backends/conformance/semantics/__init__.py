"""Checks what torch promises beyond values: mutation, aliases, strides, dtypes, random numbers.

`CHECKS` has all of them by name. A check raises what is wrong: an AssertionError where a result is
not eager's, `OwnRandomNumbersError` where nothing but the random numbers differs.
"""

from collections.abc import Callable

from dynamo_backends.conformance.semantics import control, memory, modes, numbers, training
from dynamo_backends.conformance.subject import Subject

CHECKS: dict[str, Callable[[Subject], None]] = {
    **memory.CHECKS,
    **numbers.CHECKS,
    **modes.CHECKS,
    **training.CHECKS,
    **control.CHECKS,
}
