"""The backend of a step in a file."""

from collections.abc import Mapping
from typing import Any

from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import SaveError
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.package.structure import decoded

_CALL_BY_CALL = ("eager", "aot_eager")
_WITH_THEIR_OWN = ("inductor", "autotune")


def inner_of(name: str) -> Backend | None:
    """Returns the backend of that name; None: the graph runs call by call.

    Raises:
        SaveError: Its steps have more than a graph.
        UnknownBackendError: There is none.
    """
    if name in _CALL_BY_CALL:
        return None
    if name in _WITH_THEIR_OWN:
        raise SaveError(
            f"steps of {name} cannot be saved: they have more than one program. Compile the step "
            'with backend="openxla" or "aot_eager".'
        )
    return get_backend(name)


def parsed(backend: Backend, options: Mapping[str, Any]) -> Options:
    """Returns the options of a manifest."""
    return backend.Options.parse(decoded(options), backend.name)
