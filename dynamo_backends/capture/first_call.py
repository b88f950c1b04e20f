"""Has `optimize`, and warns if a first call runs no operator on the backend.

Dynamo hands no graph to a backend where it gives up a function, and says nothing. So its decorator,
in `torch.compile`, `optimize` and `module.compile()` (see `_autoload.check_first_calls`), is
watched until the first call has returned; afterwards no call costs more. If nothing was captured,
one warning says why, a report says so to `record()`, and `counters()` counts it. With
`fallback="error"` it raises, and so does each graph break, at every compilation.

A call is not judged that raises, or in which nothing is to be compiled: under `run()`, `disable()`,
a stance, or a dispatch mode. Functions with `fullgraph=True` have torch's own errors.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn

from dynamo_backends._torch_private import dynamo_control
from dynamo_backends._torch_private import dynamo_monitoring as private
from dynamo_backends.capture.backend_resolution import (
    CompilerFunction,
    refuses_eager,
    resolve_backend,
)
from dynamo_backends.capture.callback_scopes import Callback, CallbackScope, Hook
from dynamo_backends.capture.graph_breaks import GraphBreak, merge_graph_breaks, record_graph_breaks
from dynamo_backends.interface import captures
from dynamo_backends.interface.compiler import Compiler
from dynamo_backends.interface.publishing import (
    NO_OPERATORS,
    publish_nothing_compiled,
    uncaptured_error,
)
from dynamo_backends.interface.report import GraphReport, is_trial_thread

NOT_LOOKED_AT = "Dynamo does not trace this code, because it belongs to torch or is a builtin."


@dataclass
class _Call(captures.Captures):
    """A first call that is under way.

    Attributes:
        breaks: Where capture stopped in it.
        frames: Code objects of what Dynamo tried to compile.
        error: The exception that was being handled when it began.
    """

    breaks: list[GraphBreak] = field(default_factory=list)
    frames: list[CodeType] = field(default_factory=list)
    error: BaseException | None = None

    def cause(self) -> str:
        """Returns why nothing was captured, in sentences."""
        if self.breaks:
            return " ".join(str(found) for found in merge_graph_breaks(self.breaks)[:3])
        return NO_OPERATORS if self.frames or self.graphs else NOT_LOOKED_AT


class FirstCallCheck:
    """Warns, or raises, if the first call under Dynamo's decorator captures nothing.

    Args:
        context: The decorator.
        backend: Name of the backend.
        refuses: Whether `fallback="error"` is set.
        name: Of what is compiled.
    """

    def __init__(self, context: Any, backend: str, refuses: bool, name: str):
        self._context = context
        self._backend = backend
        self._refuses = refuses
        self._name = name
        self._codes: list[CodeType] = []
        self._threads = threading.local()
        self._cause = ""  # why nothing was captured in an earlier call
        private.wrap_frame_conversion(context, self._noting)
        context.enter_exit_hooks.append(self._enter)

    def register_compiled(self, compiled: Any) -> None:
        """Registers the function or module that the decorator returned."""
        code = getattr(getattr(compiled, "_torchdynamo_orig_callable", None), "__code__", None)
        if isinstance(code, CodeType) and not isinstance(compiled, nn.Module):
            self._codes.append(code)

    @contextlib.contextmanager
    def _noting(self, code: CodeType) -> Iterator[None]:
        call = getattr(self._threads, "call", None) or _Call()
        call.frames.append(code)
        # A block captures whatever generator its lines go through.
        refuses = self._refuses and (self._codes or not code.co_flags & inspect.CO_GENERATOR)
        with record_graph_breaks(code, call.breaks, self._backend if refuses else ""):
            yield

    def _enter(self) -> Callable[[], None]:
        """Returns a hook of the decorator, before a call."""
        if not private.is_dynamo_enabled() or getattr(self._threads, "call", None) is not None:
            return _nothing
        private.retry_skipped(self._codes)  # which other functions may have in common with it
        call = self._threads.call = _Call(error=sys.exc_info()[1])
        captures.thread.calls.append(call)
        return functools.partial(self._leave, call, private.watch_code_reuse(captures.note_reuse))

    def _leave(self, call: _Call, end: Callable[[], None]) -> None:
        """Returns what the hook returns after the call."""
        end()
        captures.thread.calls[:] = [c for c in captures.thread.calls if c is not call]
        self._threads.call = None
        if sys.exc_info()[1] is not call.error:
            return  # the call raised
        reuses = not self._cause and self._reuses_graphs(call)
        if call.graphs > call.without_operators or reuses:
            self._end()
        elif self._codes or call.breaks:  # and not a `with` block that calls nothing
            is_first, self._cause = not self._cause, self._cause or call.cause()
            self._say(is_first)

    def _reuses_graphs(self, call: _Call) -> bool:
        """Returns whether graphs ran that were captured before."""
        frames = {id(code) for code in call.frames}
        return bool(call.reused) and private.has_compiled_graphs(self._context, frames)

    def _end(self) -> None:
        with contextlib.suppress(ValueError):  # another thread was faster
            self._context.enter_exit_hooks.remove(self._enter)

    def _say(self, is_first: bool) -> None:
        if self._refuses:
            raise uncaptured_error(self._backend, self._name, self._cause)
        self._end()
        if is_first and not is_trial_thread():
            report = GraphReport(self._backend, "inference")
            publish_nothing_compiled(report, self._name, self._cause)


def _nothing() -> None:
    pass


def get_first_call_check(context: Any, backend: Any, fn: Any) -> FirstCallCheck | None:
    """Returns the check of Dynamo's decorator, made once; None if it needs no check.

    Args:
        context: The decorator.
        backend: What it hands graphs to, a compiler object or torch's wrapper of one.
        fn: What it is applied to.
    """
    if not private.allows_graph_breaks(context):
        return None
    check: FirstCallCheck | None = getattr(context, "_dynamo_backends_check", None)
    if check is None:
        name = getattr(backend, "compiler_fn", backend).__name__
        check = FirstCallCheck(context, name, refuses_eager(backend), _name(fn))
        context._dynamo_backends_check = check
    return check


def install_block_check(context: Any) -> None:
    """Installs the check for `with` blocks of Dynamo's decorator, for our backends only.

    Args:
        context: The decorator; nothing is done if its backend is not of this package.
    """
    backend = private.backend_of(context)
    if isinstance(getattr(backend, "compiler_fn", backend), Compiler):
        get_first_call_check(context, backend, None)


def _name(fn: Any) -> str:
    if fn is None:
        return "a `with` block"
    owner = getattr(fn, "__self__", fn)
    if isinstance(owner, nn.Module):
        return type(owner).__name__
    if inspect.isbuiltin(fn):
        return fn.__name__
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def optimize(
    backend_or_compiler_fn: str | CompilerFunction,
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
) -> "OptimizeScope":
    """Captures graphs with Dynamo and compiles them: a decorator and a context manager.

    Examples:
        >>> def compiler(gm, example_inputs):
        ...     gm.graph.print_tabular()
        ...     return gm.forward
        >>> fast = optimize(compiler)(model)  # or @optimize(compiler)
        >>> with optimize(compiler):
        ...     model(images)

    As a decorator it takes functions, methods, modules, and generator functions (what they call is
    captured). A `with` block captures all functions that are called in it, modules of
    torch.nn included; the block's own lines run in eager, because their frame was running before.
    The object holds no state: it can be nested, entered again while it is in use, and shared by
    threads. Each thread captures only in its own blocks.

    Args:
        backend_or_compiler_fn: The name of a backend of this package or any other that
            `torch.compile` knows; a `Compiler`; or a function that takes a graph module and its
            example inputs (real tensors) and returns a callable that runs the graph.
        dynamic: True captures sizes as symbols at once, False never, None once they vary.
        fullgraph: A graph break is an error.
        options: Options of the backend; a function gets them as the keyword argument `options`.

    Raises:
        UnknownBackendError: Nothing is registered under that name; the message has the nearest.
        OptionError: An option is wrong.
        TypeError: The first argument is no backend.
    """
    backend = resolve_backend(backend_or_compiler_fn, options, dynamic)
    return OptimizeScope(backend, dynamic, fullgraph)


class OptimizeScope(CallbackScope):
    """The decorator and context manager that `optimize` returns.

    Attributes:
        backend: What Dynamo calls: the same object for equal arguments of `optimize`, so that
            Dynamo does not compile again.
    """

    def __init__(self, backend: str | CompilerFunction, dynamic: bool | None, fullgraph: bool):
        self.backend = backend
        self._dynamic = dynamic
        self._fullgraph = fullgraph
        self._context = self._new_context()
        install_block_check(self._context)

    def __repr__(self) -> str:
        """As a call that makes it, less what it is called without."""
        given = {"dynamic": self._dynamic, "fullgraph": self._fullgraph}
        settings = "".join(f", {k}={v!r}" for k, v in given.items() if v)
        return f"optimize({self.backend!r}{settings})"

    def __call__(self, fn: Any) -> Any:
        """Returns the function or module, captured whenever it is called."""
        if inspect.isgeneratorfunction(fn):
            return dynamo_control.run_within(lambda: self, fn)
        return self._new_context()(fn)

    def _new_context(self) -> Any:
        """Makes Dynamo's decorator; each function has its own, whose first call is checked."""
        return dynamo_control.dynamo_context(self.backend, self._dynamic, self._fullgraph)

    def _callback(self) -> Callback:
        callback: Callable[..., Any] | None = getattr(self._context, "callback", None)
        return dynamo_control.CaptureTorchNNCallback(callback) if callback is not None else None

    def _hooks(self) -> tuple[Hook, ...]:
        return (
            dynamo_control.CaptureTorchNNCallback.retry_torch_nn_frames,
            *dynamo_control.entry_hooks(self._context),
        )
