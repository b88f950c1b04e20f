"""The backends that a benchmark run names."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dynamo_backends._torch_private.dynamo_control import torch_backends
from dynamo_backends.bench import exports
from dynamo_backends.bench.cells import EAGER
from dynamo_backends.bench.factories import load_file
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import (
    BackendUnavailableError,
    UnknownBackendError,
    did_you_mean,
)
from dynamo_backends.interface.registry import (
    get_backend,
    import_attribute,
    list_backends,
    third_party_backends,
)


def require_backend(name: str) -> None:
    """Raises if a backend cannot be used on this machine.

    Args:
        name: "eager"; one of `bench.exports.EXPORTS`; a name that `torch.compile` takes; or
            FILE.py:FUNCTION or
            MODULE:FUNCTION, a function of a captured graph and its example inputs.

    Raises:
        UnknownBackendError: There is no such backend.
        OptionError: There is no such export.
        BackendUnavailableError: It lacks something on this machine.
    """
    file, _, function = name.rpartition(":")
    if exports.is_export(name):
        exports.require(name)
    elif file.endswith(".py"):
        if not Path(file).is_file():
            raise UnknownBackendError(f"there is no file {file!r} with a function {function!r}.")
    elif file:
        if not _is_module(file):
            raise UnknownBackendError(f"there is no module {file!r} with a function {function!r}.")
    elif name in list_backends():
        available = get_backend(name).availability()
        if not available.usable:
            raise BackendUnavailableError(f"{name}: {available.reason} ({available.remedy})")
    else:
        others = {EAGER, *torch_backends(debugging=True), *third_party_backends()}
        if name not in others:
            known = sorted({*others, *list_backends()})
            raise UnknownBackendError(
                f"there is no backend {name!r}.{did_you_mean(name, known)} "
                "`dynamo-backends list` shows those of this package; FILE.py:FUNCTION and "
                "MODULE:FUNCTION name one of your own."
            )


def resolve_compiler(name: str) -> Any:
    """Returns the value for `torch.compile(backend=...)` from a backend's name."""
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        found: Callable[..., Any] = getattr(load_file(Path(file)), function)
        return found
    if file:
        with _current_folder():
            return import_attribute(name)
    return compiler(name) if name in list_backends() else name


def _is_module(name: str) -> bool:
    with _current_folder(), contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(name) is not None
    return False


@contextlib.contextmanager
def _current_folder() -> Iterator[None]:
    """Finds modules in the current folder, too, as `python -m` does."""
    folder = os.getcwd()
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
