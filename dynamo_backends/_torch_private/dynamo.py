"""Dynamo's registry, counters and accuracy rule; torch's profiler and structured logs.

| what | checked |
|---|---|
| `torch._dynamo.lookup_backend` | 2.11+ |
| `torch._dynamo.utils`: `meets_benchmark_accuracy`, `counters` | 2.11+ |
| `torch._dynamo.exc`: `RestartAnalysis`, `SkipFrame` | 2.11.0, 2.13.0, 2.15.0 |
| `torch._dynamo.exc.BackendCompilerFailed`, which passes | 2.11.0, 2.13.0, 2.15.0 |
| `torch._dynamo.convert_frame.compile_lock`, an `RLock` | 2.13.0 |
| `torch._disable_dynamo`, which imports `torch._dynamo` at the first call | 2.13.0 |
| `torch._dynamo.callback_handler.__pending_callbacks_counter` | 2.13.0 |
| `InstructionTranslator.current_tx`, its `f_code`; `TORCH_DYNAMO_RESUME_IN_PREFIX` | 2.13.0 |
"""

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch._compile import _disable_dynamo as hidden_from_dynamo  # noqa: F401
from torch.autograd import profiler


def lookup_backend(name: str) -> Callable[..., Any]:
    """Returns the function registered for `torch.compile(backend=name)`."""
    from torch._dynamo import lookup_backend as look_up

    return look_up(name)


def dynamo_counters() -> Any:
    """Returns Dynamo's live counters of graphs, breaks and frames."""
    from torch._dynamo.utils import counters

    return counters


def is_capturing() -> bool:
    """Returns whether any thread is inside a compilation by Dynamo or AOT Autograd."""
    from torch._dynamo import callback_handler

    name = "_CompilationCallbackHandler__pending_callbacks_counter"
    return bool(getattr(callback_handler, name, 0))


_excluding: list[threading.Thread] = []


@contextlib.contextmanager
def blocking_other_captures() -> Iterator[None]:
    """Makes Dynamo captures of other threads wait (context manager)."""
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:
        _excluding.append(threading.current_thread())
        try:
            yield
        finally:
            _excluding.pop()


def _after_fork() -> None:
    """Frees the compile lock in a forked child whose parent's other thread held it."""
    if _excluding and _excluding[0] is not threading.current_thread():
        from torch._dynamo.convert_frame import compile_lock

        _excluding.clear()
        lock: Any = compile_lock
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def dynamo_control_exceptions() -> tuple[type[Exception], ...]:
    """Returns Dynamo's exceptions for retracing and skipping, which must not be caught."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return RestartAnalysis, SkipFrame


def make_dynamo_passing_error(error: Exception, frame: FrameType | None) -> Exception:
    """Makes a copy of a backend's error that Dynamo does not wrap in its own.

    Dynamo wraps what a backend raises in `BackendCompilerFailed`, and lets errors pass that are of
    that class. The result is of that class and of the error's own, so that both can be caught.
    Its traceback has no frames of this package, unless `TORCHDYNAMO_VERBOSE=1` asks for all.

    Args:
        error: What the backend raised.
        frame: Where the traceback that users see begins, below their own frames.
    """
    from torch._dynamo import config

    own: Any = type(error)
    kind = _passing(own)
    passing: Any = kind.__new__(kind)
    passing.__dict__.update(error.__dict__)
    passing.args = error.args
    passing.backend_name = getattr(error, "backend_name", "")
    passing.inner_exception = error
    passing.first_useful_frame = frame
    passing.__cause__, passing.__suppress_context__ = error.__cause__, True
    found: Exception = passing.with_traceback(error.__traceback__ if config.verbose else None)
    return found


@functools.cache
def _passing(kind: Any) -> Any:
    from torch._dynamo.exc import BackendCompilerFailed

    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__str__": kind.__str__,
        "__reduce__": lambda self: self.inner_exception.__reduce__(),
    }
    return type(kind.__name__, (kind, BackendCompilerFailed), names)


def captured_argument_names() -> tuple[tuple[str, ...], str, str]:
    """Returns the argument names of the function that Dynamo is capturing.

    Returns:
        Those that have names, in order, without "self"; the one of further positional arguments;
        the one of further named ones. Empty where there are none, where they are not known, and
        where the function is what follows a graph break.
    """
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:
        return (), "", ""
    if code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX):
        return (), "", ""
    count = code.co_argcount + code.co_kwonlyargcount
    names = tuple(name for name in code.co_varnames[:count] if name != "self")
    further = iter(code.co_varnames[count:])
    positional = next(further) if code.co_flags & inspect.CO_VARARGS else ""
    return names, positional, next(further) if code.co_flags & inspect.CO_VARKEYWORDS else ""


def meets_benchmark_accuracy(
    reference: Any, result: Any, fp64_reference: Any, **settings: Any
) -> bool:
    """Returns whether a result passes the accuracy check of PyTorch's benchmarks."""
    from torch._dynamo.utils import same as rule

    return rule(reference, result, fp64_reference, **settings)


def is_profiled() -> bool:
    """Returns whether a torch profiler is recording in any thread; takes about 50 ns."""
    return profiler._is_profiler_enabled


def compile_id() -> str:
    """Returns Dynamo's id of this thread's compilation, such as "0/1"; "" outside."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id() or "")


def trace_artifact(name: str, payload: Callable[[], Any], compilation: str) -> None:
    """Writes a JSON document to torch's structured logs (`TORCH_TRACE`), if they are on.

    Args:
        name: Name of the document.
        payload: Makes it, of types that JSON has.
        compilation: Its `compile_id`, for documents that are made after the compilation.
    """
    from torch._guards import CompileId
    from torch._logging import _internal

    if _internal.trace_log.handlers:
        _internal.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "json"},
            payload_fn=payload,
            compile_id=CompileId.from_string(compilation or None),
        )
