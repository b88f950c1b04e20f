"""Resolves what a user names as a backend to the one object Dynamo compares."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_backends._torch_private.dynamo_control import torch_backends, wrap_backend_with_options
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.compiler import Compiler, compiler
from dynamo_backends.interface.errors import OptionError, UnknownBackendError, did_you_mean
from dynamo_backends.interface.registry import list_backends

CompilerFunction = Callable[..., Any]
"""Takes a graph module and its example inputs; returns what runs the graph."""

_with_options: list[CompilerFunction] = []
_lock = fork_safe_lock()


def resolve_backend(
    backend: str | CompilerFunction,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> str | CompilerFunction:
    """Resolves a backend to the object for Dynamo; equal arguments give the same object.

    Args:
        backend: A name, a `Compiler` or a function.
        options: What the backend is called with.
        dynamic: As for `torch.compile`; Inductor keeps it among its options.

    Returns:
        A name that torch knows, or a function.

    Raises:
        UnknownBackendError: Nothing is registered under the name.
        OptionError: An option is wrong, or the function takes none.
        TypeError: It is neither a name nor a function of a graph and its inputs.
    """
    options = _checked(options)
    if isinstance(backend, str):
        if backend in list_backends():
            return compiler(backend, **options)
        _require_known(backend)
    elif isinstance(backend, Compiler):
        backend.options(options)
    else:
        _require_compiler(backend, options)
    return _interned(wrap_backend_with_options(backend, options, dynamic)) if options else backend


def refuses_eager(backend: Any) -> bool:
    """Returns whether `fallback="error"` is set for a backend of this package.

    Args:
        backend: As torch has it: a compiler object, or its wrapper with options around that.
    """
    compiler = getattr(backend, "compiler_fn", backend)
    options = getattr(backend, "kwargs", {}).get("options") or {}
    asks = getattr(compiler, "refuses_eager", None)
    if asks is not None:
        return bool(asks(options))
    ours = type(compiler).__module__.startswith("dynamo_backends.")
    return ours and options.get("fallback") == "error"


def _checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise OptionError(
            f"options must be a mapping such as {{'verify': True}}, not {_described(options)}"
        )
    return dict(options)


def _require_known(name: str) -> None:
    everything = torch_backends(debugging=True)
    if name not in everything:
        known = sorted({*list_backends(), *torch_backends()})
        hint = did_you_mean(name, {*known, *everything}, 2)
        raise UnknownBackendError(
            f"there is no backend {name!r}.{hint} Backends: {', '.join(known)}."
        )


def _require_compiler(function: Any, options: Mapping[str, Any]) -> None:
    if not callable(function) or isinstance(function, type) or hasattr(function, "forward"):
        raise TypeError(
            "optimize() takes a backend as its first argument: a name, or a function of a graph "
            f"module and its example inputs, not {_described(function)}. To compile a function or "
            'a model, write optimize("openxla")(model).'
        )
    if options and not _accepts(function, options=options) and _accepts(function):
        raise OptionError(
            f"{_described(function)} takes no options, but options={options!r} were given. Remove "
            "options, or add a parameter options to the backend."
        )
    if not _accepts(function, **({"options": options} if options else {})):
        raise TypeError(
            f"{_described(function)} cannot be used as a backend, because it cannot be called with "
            "a graph module and a list of example inputs" + (" and options=..." if options else "")
        )


def _accepts(function: CompilerFunction, **keywords: Any) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # a builtin: what it takes shows when it is called
    try:
        signature.bind("graph", [], **keywords)
    except TypeError:
        return False
    return True


def _described(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    if name is None:
        return (
            f"{value!r}" if isinstance(value, int | float | None) else f"a {type(value).__name__}"
        )
    return f"the class {name}" if isinstance(value, type) else f"{name}()"


def _interned(function: CompilerFunction) -> CompilerFunction:
    with _lock:
        for known in _with_options:
            if known == function:
                return known
        _with_options.append(function)
    return function
