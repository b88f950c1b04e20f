"""Tracing in one thread while others call compiled functions.

| what | checked |
|---|---|
| `torch.fx._symbolic_trace`: `Tracer.trace`, `_Patcher`, and its variables `_is_fx_tracing_flag` and `_new_patcher` | 2.13* |
| `torch.fx.experimental.proxy_tensor.PythonKeyTracer` | 2.13* |

`Tracer.trace` says in a variable of its module that something is traced, for which every compiled
function that is called meanwhile raises, and replaces `nn.Module.__call__` and `__getattr__`, both
for all threads. Two traces at once may leave both as they are inside for good.
"""  # noqa: E501

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import fx
from torch.fx import _symbolic_trace

from dynamo_backends._torch_private.forks import fork_safe_lock

_here = threading.local()
_lock = fork_safe_lock()


class _NoPatches(_symbolic_trace._Patcher):
    """Replaces nothing: `make_fx` looks into modules, and takes attributes as they are."""

    def patch(self, *_: Any, **__: Any) -> None:
        pass

    def patch_method(self, *_: Any, **__: Any) -> None:
        pass


@contextlib.contextmanager
def _no_patches() -> Iterator[_NoPatches]:
    yield _NoPatches()


def _with_own_variables(trace: Any) -> Callable[..., fx.Graph]:
    """Returns the function with its own copy of its module's variables."""
    variables = dict(trace.__globals__, _is_fx_tracing_flag=False, _new_patcher=_no_patches)
    return FunctionType(
        trace.__code__, variables, trace.__name__, trace.__defaults__, trace.__closure__
    )


@functools.cache
def _install() -> None:
    """From now on `Tracer.trace` is another function in threads that are `tracing_apart`."""
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    original: Any = fx.Tracer.trace
    apart = _with_own_variables(inspect.unwrap(original))  # Dynamo puts a function around it

    @functools.wraps(original)
    def trace(self: fx.Tracer, *args: Any, **kwargs: Any) -> fx.Graph:
        alone = getattr(_here, "is_apart", False) and isinstance(self, PythonKeyTracer)
        return (apart if alone else original)(self, *args, **kwargs)

    fx.Tracer.trace = trace  # type: ignore[method-assign]


@contextlib.contextmanager
def tracing_apart() -> Iterator[None]:
    """Inside: other threads see nothing of what `make_fx` traces in this one."""
    with _lock:
        _install()
    before = getattr(_here, "is_apart", False)
    _here.is_apart = True
    try:
        yield
    finally:
        _here.is_apart = before
