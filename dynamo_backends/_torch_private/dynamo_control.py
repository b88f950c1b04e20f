"""Dynamo's own private APIs, for steering it and for counting what it captures.

`watching` has those for watching one compilation.

| what | checked |
|---|---|
| `torch._C._dynamo.eval_frame.set_eval_frame`, `set_skip_guard_eval_unsafe` | 2.11+ |
| `torch._dynamo.optimize`: `callback` and `enter_exit_hooks` of its result | 2.11+ |
| `torch._dynamo.eval_frame`: `_stance`, `_callback_from_stance` | 2.11+ |
| `torch._dynamo.eval_frame`: `RunOnlyContext`, `DisableContext`, `OptimizedModule` | 2.11+ |
| `torch._dynamo.convert_frame`: `CatchErrorsWrapper`, `register_bytecode_hook` | 2.11+ |
| `torch._dynamo.trace_rules.check`, which takes the frame from torch 2.12 on | 2.11+ |
| `torch._dynamo.output_graph.OutputGraph.call_user_compiler` | 2.11+ |
| `torch._TorchCompileWrapper`, `torch._TorchCompileInductorWrapper` | 2.11+ |
| `torch._dynamo.utils.get_compilation_metrics`, `torch._guards.CompileContext` | 2.11+ |
| `torch.utils._python_dispatch`: `ignore_compile_internals`, `_pop_mode_temporarily` | 2.11+ |
| `torch.utils._contextlib.context_decorator`, `torch._C._current_graph_task_id` | 2.11+ |
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.utils import _contextlib
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends._torch_private.forks import fork_safe_lock

run_within = _contextlib.context_decorator
set_callback: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
"""Sets what this thread asks before each Python frame; returns what it asked before."""


def resolve_stance_callback(callback: Any) -> Any:
    """Returns the callback that Dynamo uses in place of one under the current stance."""
    from torch._dynamo import eval_frame

    return eval_frame._callback_from_stance(callback)


def dynamo_context(backend: str | Callable[..., Any], dynamic: bool | None, fullgraph: bool) -> Any:
    """Returns `torch._dynamo.optimize`'s decorator for a backend."""
    import torch._dynamo

    return torch._dynamo.optimize(backend, nopython=fullgraph, dynamic=dynamic)


def entry_hooks(context: Any) -> tuple[Callable[[], Callable[[], Any]], ...]:
    """Returns the hooks to call before Dynamo runs code; each returns its undo function."""
    return (*getattr(context, "enter_exit_hooks", ()), _guards_as_the_stance_says)


def _guards_as_the_stance_says() -> Callable[[], Any]:
    from torch._C._dynamo.eval_frame import set_skip_guard_eval_unsafe
    from torch._dynamo import eval_frame

    prior = set_skip_guard_eval_unsafe(eval_frame._is_skip_guard_eval_unsafe_stance())
    return lambda: set_skip_guard_eval_unsafe(prior)


class CaptureTorchNNCallback:
    """A Dynamo frame callback that also captures the modules of torch.nn.

    Dynamo passes over frames of torch's own files. `torch.compile` wraps such a module in a
    function; under a `with` block nothing does.
    """

    _given_up: ClassVar[set[CodeType]] = set()

    def __init__(self, callback: Callable[..., Any]):
        self._torchdynamo_orig_backend = callback

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        callback: Any = self._torchdynamo_orig_backend
        if not _is_forward_of_torch_nn(frame):
            return callback(frame, cache_entry, frame_state)
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock:
            convert = callback._torchdynamo_orig_backend
            result = convert(frame, cache_entry, callback.hooks, frame_state, skip=1)
        if result.guarded_code is None:
            self._given_up.add(frame.f_code)
        return result

    @classmethod
    def retry_torch_nn_frames(cls) -> Callable[[], None]:
        """Makes Dynamo look again at torch.nn frames that it chose to skip (entry hook)."""
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        strategy = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)
        for code in _forwards_of_torch_nn():
            if code not in cls._given_up:
                set_code_exec_strategy(code, strategy)
        return lambda: None


@functools.cache
def _forwards_of_torch_nn() -> tuple[CodeType, ...]:
    kinds = [k for k in vars(nn).values() if isinstance(k, type) and issubclass(k, nn.Module)]
    return tuple(dict.fromkeys(k.forward.__code__ for k in kinds if k is not nn.Module))


def _is_forward_of_torch_nn(frame: Any) -> bool:
    if frame.f_code.co_name != "forward":
        return False
    module = frame.f_locals.get("self")
    if not isinstance(module, nn.Module) or not type(module).__module__.startswith("torch.nn."):
        return False
    from torch._dynamo import config, convert_frame

    in_a_mode = convert_frame.is_in_any_mode_without_ignore_compile_internals()
    return _is_passed_over(frame) and not (config.disable or in_a_mode)


def _is_passed_over(frame: Any) -> bool:
    """Returns whether Dynamo passes over a frame. In torch 2.11 that depends on the code alone."""
    from torch._dynamo import trace_rules

    check: Callable[..., bool] = trace_rules.check
    if "frame" in inspect.signature(check).parameters:
        return check(frame.f_code, frame=frame)
    return check(frame.f_code)


class _StancePerThread:
    """Takes the place of Dynamo's stance, which is one for all threads."""

    def __init__(self, otherwise: Any, of_this_thread: Callable[[], str | None]):
        self._otherwise = otherwise
        self._of_this_thread = of_this_thread

    @property
    def stance(self) -> str:
        chosen = self._of_this_thread()
        if chosen is None or self._otherwise.stance == "force_eager":
            return str(self._otherwise.stance)
        return chosen

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        return bool(self._otherwise.skip_guard_eval_unsafe)

    @property
    def backend(self) -> Any:
        return self._otherwise.backend


class SharedPatch:
    """A reference-counted patch of Dynamo: made by its first user, undone by the last."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._users = 0
        self._undo: Callable[[], None] = lambda: None

    def acquire(self, change: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Applies the change unless it is applied already; returns the function that ends it."""
        with self._lock:
            if not self._users:
                self._undo = change()
            self._users += 1
        return self._end

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._undo()


_stance = SharedPatch()
_graphs = SharedPatch()


def stance_per_thread(of_this_thread: Callable[[], str | None]) -> Callable[[], None]:
    """Patches Dynamo to take its stance from a function of the thread, until ended.

    Args:
        of_this_thread: The same function in every use.

    Returns:
        What ends it.
    """

    def change() -> Callable[[], None]:
        from torch._dynamo import eval_frame

        before = eval_frame._stance
        ours: Any = _StancePerThread(before, of_this_thread)
        eval_frame._stance = ours

        def undo() -> None:
            if eval_frame._stance is ours:  # and not what `torch.compiler.set_stance` set since
                eval_frame._stance = before

        return undo

    return _stance.acquire(change)


def original_module(module: nn.Module) -> nn.Module:
    """Unwraps `torch.compile(module)`; returns any other module as it is."""
    from torch._dynamo import OptimizedModule

    while isinstance(module, OptimizedModule):
        module = module._orig_mod
    return module


def is_compiled(fn: Any) -> bool:
    """Returns whether `torch.compile` or `module.compile` has wrapped a callable."""
    from torch._dynamo import OptimizedModule

    if isinstance(fn, nn.Module):
        return isinstance(fn, OptimizedModule) or fn._compiled_call_impl is not None
    return getattr(fn, "_torchdynamo_wrapper_id", None) == id(fn)


def wrap_to_run_only(fn: Any, hook: Callable[[], Callable[[], Any]]) -> Any:
    """Wraps a callable so that Dynamo compiles nothing, only runs compiled code."""
    from torch._dynamo.eval_frame import DisableContext, RunOnlyContext

    class RunOnly(RunOnlyContext):
        def __call__(self, fn: Any) -> Any:
            wrapped = super().__call__(fn)
            if isinstance(fn, nn.Module | type):
                return wrapped
            # Dynamo would capture `fn` where a captured frame calls this.
            call = functools.wraps(fn)(lambda *args, **kwargs: wrapped(*args, **kwargs))
            return DisableContext(msg="it is under run()")(call)

    context = RunOnly()
    context.enter_exit_hooks.append(hook)
    return context(original_module(fn) if isinstance(fn, nn.Module) else fn)


def wrap_as_disabled(fn: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Wraps a function, class or module so that Dynamo skips it."""
    from torch._dynamo.eval_frame import DisableContext

    class Disable(DisableContext):
        def __call__(self, fn: Any) -> Any:
            if isinstance(fn, nn.Module | type):
                return super().__call__(fn)
            return super().__call__(around(fn))

    if isinstance(fn, nn.Module):
        from torch._dynamo import OptimizedModule

        return OptimizedModule(original_module(fn), Disable())
    return Disable(msg="it is under disable()")(fn)


def torch_backends(debugging: bool = False) -> list[str]:
    """Returns the names of the backends that torch knows, other packages' included.

    Args:
        debugging: Whether to list those as well that serve torch's own debugging.
    """
    import torch._dynamo

    names: list[str] = torch._dynamo.list_backends(() if debugging else ("debug", "experimental"))
    return names


def not_traced(fn: Any) -> Any:
    """Marks a function as disabled: a captured call of it breaks the graph (decorator)."""
    fn._torchdynamo_disable = True
    fn._torchdynamo_disable_msg = "it changes what Dynamo does"
    return fn


def wrap_backend_with_options(
    backend: str | Callable[..., Any], options: Mapping[str, Any], dynamic: bool | None
) -> Callable[..., Any]:
    """Wraps a backend with options; equal options make backends equal to Dynamo.

    Args:
        backend: A name that torch knows, or a function that takes `options`.
        options: What it is called with.
        dynamic: As for `torch.compile`.
    """
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(None, dict(options), dynamic)
    return torch._TorchCompileWrapper(backend, None, dict(options), dynamic)


@contextlib.contextmanager
def intercepting_graphs(
    around: Callable[[CodeType, fx.GraphModule, Callable[[], Callable[..., Any]]], Any],
) -> Iterator[None]:
    """Passes each graph's compilation, in any thread, through `around` (context manager).

    Args:
        around: Given the code that the graph comes from, the graph and what compiles it; returns
            a callable. The same function in every use.
    """

    def change() -> Callable[[], None]:
        from torch._dynamo.output_graph import OutputGraph

        owner: Any = OutputGraph
        original = owner.call_user_compiler

        def call_user_compiler(self: Any, gm: fx.GraphModule, inputs: list[Any]) -> Any:
            return around(self.root_tx.f_code, gm, lambda: original(self, gm, inputs))

        owner.call_user_compiler = call_user_compiler

        def undo() -> None:
            owner.call_user_compiler = original

        return undo

    end = _graphs.acquire(change)
    try:
        yield
    finally:
        end()


@contextlib.contextmanager
def watching_compiled_frames(told: Callable[[CodeType], None]) -> Iterator[None]:
    """Calls `told` with the code of each frame Dynamo compiles (context manager)."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    def hook(code: CodeType, new_code: CodeType) -> None:
        told(code)

    handle = register_bytecode_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def current_compile_id() -> str | None:
    """Returns Dynamo's id of this thread's compilation, such as "0/1"; None outside."""
    from torch._guards import CompileContext

    found = CompileContext.current_compile_id()
    return None if found is None else str(found)


def compiled_function() -> str | None:
    """Returns the function's part of the current compile id, such as "0"; None outside."""
    name = current_compile_id()
    return None if name is None else name.partition("/")[0]


def compilation_metrics() -> list[Any]:
    """Returns Dynamo's metrics of its last 64 compilations."""
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


class DynamoTransparentMode(TorchDispatchMode):
    """A dispatch mode that Dynamo ignores: it captures and compiles as if without it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, without which Dynamo would not compile under this mode."""
        return True


@contextlib.contextmanager
def popping_dispatch_mode(mode: TorchDispatchMode) -> Iterator[None]:
    """Pops a dispatch mode if it is on top of the stack (context manager)."""
    from torch.utils import _python_dispatch as modes

    if modes._get_current_dispatch_mode() is not mode:
        yield
        return
    with modes._pop_mode_temporarily():
        yield


def is_in_backward() -> bool:
    """Returns whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1
