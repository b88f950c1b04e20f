"""`run`, `disable` and `reset`: use what is compiled, use none of it, forget it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from dynamo_backends._torch_private import control
from dynamo_backends.capture.scopes import (
    Callback,
    Hook,
    Scope,
    nothing_compiled,
    nothing_new,
)


def run() -> "NoCompilation":
    """Runs what is compiled and compiles nothing new: the rest runs in eager.

    A shape, a dtype or a branch that was not seen before costs its eager time, never a
    compilation. This holds in the calling thread for everything inside, whether `optimize`,
    `torch.compile` or `module.compile()` made it.

    It holds for what this package's backends compile late, too: the backward graph, and executables
    for further sizes of a symbolic shape. Those of other packages may still compile these.

    Examples:
        >>> with run():
        ...     compiled(images)
        >>> serve = run()(compiled)
    """
    return NoCompilation()


def disable() -> "Disable":
    """Runs everything in eager, compiled code too: a decorator and a context manager like `run`.

    Inside a captured function, a call of a function under it is a graph break.

    Examples:
        >>> with disable():
        ...     expected = compiled(images)
    """
    return Disable()


def reset() -> None:
    """Forgets all compiled code of this process. What is cached on disk stays."""
    import torch

    torch.compiler.reset()


class NoCompilation(Scope):
    """What `run` returns."""

    def __repr__(self) -> str:
        """As a call that makes it."""
        return "run()"

    def __call__(self, fn: Any) -> Any:
        """The function, generator function or module, which compiles nothing when called."""
        if inspect.isgeneratorfunction(fn):
            return control.run_within(lambda: self, fn)
        return control.run_only(fn, nothing_new)

    def _callback(self) -> Callback:
        return False

    def _hooks(self) -> tuple[Hook, ...]:
        return (nothing_new,)


class Disable(Scope):
    """What `disable` returns."""

    def __repr__(self) -> str:
        """As a call that makes it."""
        return "disable()"

    def __call__(self, fn: Any) -> Any:
        """Returns the function, generator function or module, which always runs in eager."""
        return control.disabled(fn, self._around)

    def _around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(fn):
            return control.run_within(lambda: self, fn)

        @functools.wraps(fn)
        def in_eager(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fn(*args, **kwargs)

        return in_eager

    def _callback(self) -> Callback:
        return None

    def _hooks(self) -> tuple[Hook, ...]:
        return (nothing_compiled,)
