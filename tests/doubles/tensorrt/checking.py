"""Checks arguments against the annotations of the functions that take them, as pybind11 does."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any


class Misuse(TypeError):
    """A call that the vendor's bindings do not take, or whose effect it leaves undefined."""


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes arguments of the annotated types only."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        hints = typing.get_type_hints(function)
        for name, value in bound.arguments.items():
            if name in hints and not _matches(value, hints[name]):
                raise Misuse(f"{function.__qualname__}: {name}={value!r} is no {hints[name]}")
        return function(*args, **kwargs)

    return call


def _matches(value: Any, hint: Any) -> bool:
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is bytes:
        return isinstance(value, bytes | bytearray | memoryview) or hasattr(value, "__bytes__")
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple | list) and all(_matches(v, int) for v in value)
    if typing.get_origin(hint) is not None or hint is Any:
        return hint is Any or value is None or any(_matches(value, h) for h in hint.__args__)
    return isinstance(value, hint)


class Native:
    """An object of the vendor's: attributes that it does not have cannot be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses what a pybind11 class refuses."""
        known = any(name in vars(c) for c in type(self).__mro__)
        if not name.startswith("_") and not known:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        object.__setattr__(self, name, value)
