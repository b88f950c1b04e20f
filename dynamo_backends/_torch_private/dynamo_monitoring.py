"""Dynamo's own private APIs, for watching it at work.

| what | checked |
|---|---|
| `torch._dynamo.convert_frame`: `convert_frame`, `input_codes` | 2.11+ |
| `torch._dynamo.eval_frame`: `_optimize_catch_errors`, `get_compiler_fn` | 2.11+ |
| `torch._dynamo.eval_frame.cached_backends`, `torch._dynamo.guards` | 2.11+ |
| `torch._dynamo.hooks.Hooks`, `GuardFail`, `torch._guards.Guard` | 2.11+ |
| `torch._dynamo.utils.graph_break_reasons`, `torch._dynamo.exc` | 2.11+ |
| `torch._dynamo.exc.TorchDynamoException.frame_exec_strategy` | 2.11, 2.13, 2.15 |
| `torch._dynamo.pgo._CODE_STATE`, `_INIT_CODE_STATE` | 2.11+ |
| `torch._C._dynamo.eval_frame`: cache entries and execution strategies of code objects | 2.11+ |
| `torch._C._dynamo.eval_frame.set_guard_complete_hook` | 2.11, 2.13, 2.15 |
| `torch._dynamo.eval_frame`: `_stance`, `OptimizeContext`: `callback`, `enter_exit_hooks` | 2.11+ |
| `torch._dynamo.convert_frame.is_in_any_mode_without_ignore_compile_internals` | 2.11+ |
| `torch._dynamo.backends.registry.lookup_backend` | 2.11+ |
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from types import CodeType
from typing import Any

import torch

from dynamo_backends._torch_private.dynamo_control import SharedPatch

_CACHE_HAS_PARTS = hasattr(torch._C._dynamo.eval_frame, "_get_cache_entries_for_region")
Around = Callable[[CodeType], contextlib.AbstractContextManager[Any]]


class DynamoCacheRegion:
    """Compiles functions with Dynamo in a cache region that nothing else uses.

    Up to torch 2.12 the cache has no parts. There only entries that this region's backend compiled
    are its own, and what others compiled of a function counts against the limit of recompilations.

    Args:
        backend: Called with each captured graph and its inputs.
        around: Makes a context manager for a code object; Dynamo works on that inside it.
        on_guards: Called with the guards of each frame that has a graph, inside `around`.
        on_guard_failure: Called with each reason why an earlier compilation of the frame cannot
            be used, inside `around`.
        dynamic: As for `torch.compile`.
    """

    def __init__(
        self,
        backend: Callable[..., Any],
        around: Around,
        on_guards: Callable[[Collection[Any]], None],
        on_guard_failure: Callable[[str], None],
        dynamic: bool | None,
    ):
        from torch._dynamo import convert_frame, eval_frame
        from torch._dynamo.hooks import Hooks

        hooks = Hooks(
            guard_export_fn=lambda guards: on_guards(list(guards)),
            guard_fail_fn=self._on_guard_failure,
        )
        convert: Any = convert_frame.convert_frame(eval_frame.get_compiler_fn(backend), hooks)
        convert._inner_convert = _Watched(convert._inner_convert, around)
        self._backend = backend
        self._tell_failure = on_guard_failure
        parts: dict[str, Any] = {"isolate_recompiles": True} if _CACHE_HAS_PARTS else {}
        self._context: Any = eval_frame._optimize_catch_errors(
            convert, hooks, dynamic=dynamic, **parts
        )

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that Dynamo compiles it in this region."""
        compiled: Callable[..., Any] = self._context(fn)
        return compiled

    def forget(self, code: CodeType, fresh: bool) -> None:
        """Removes this region's compiled entries of a code object.

        Args:
            code: A code object that Dynamo worked on in this region.
            fresh: Dynamo had never seen it before; it forgets all about it.
        """
        from torch._C._dynamo import eval_frame
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        if fresh:
            eval_frame.reset_code(code)
            return
        for entry in self._entries(code):
            state = getattr(entry.guard_manager, "extra_state", None)
            if state is not None:
                state.invalidate(entry, DeletedGuardManagerWrapper("it was only explained"))

    def _entries(self, code: CodeType) -> list[Any]:
        from torch._C._dynamo import eval_frame

        if _CACHE_HAS_PARTS:
            region = self._context._isolate_recompiles_id
            return list(eval_frame._get_cache_entries_for_region(code, region))
        entries = eval_frame._debug_get_cache_entry_list(code)
        return [e for e in entries if _unwrapped(e.backend) is self._backend]

    def _on_guard_failure(self, failure: Any) -> None:
        if _CACHE_HAS_PARTS or self._entries(failure.orig_code):
            self._tell_failure(failure.reason)

    def close(self) -> None:
        """Removes the region's backend from Dynamo's table of known backends."""
        from torch._dynamo.eval_frame import cached_backends

        for key in [k for k, v in cached_backends.items() if _unwrapped(v) is self._backend]:
            del cached_backends[key]


def _unwrapped(backend: Any) -> Any:
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


class _Watched:
    """Dynamo's conversion of a frame, inside a context manager. Its copies are not watched."""

    def __init__(self, convert: Any, around: Around):
        self._convert = convert
        self._around = around

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._convert,)

    def __call__(self, frame: Any, *args: Any, skip: int = 0) -> Any:
        with self._around(frame.f_code):
            return self._convert(frame, *args, skip=skip + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._convert, name)


def _same(convert: Any) -> Any:
    return convert


def wrap_frame_conversion(context: Any, around: Around) -> None:
    """Makes Dynamo convert each frame inside `around(code)`, a context manager.

    Args:
        context: What `torch._dynamo.optimize` returns.
        around: See `DynamoCacheRegion`.
    """
    convert = context.callback._torchdynamo_orig_backend
    convert._inner_convert = _Watched(convert._inner_convert, around)


def allows_graph_breaks(context: Any) -> bool:
    """Returns whether graph breaks are allowed: false under `fullgraph=True`."""
    return hasattr(context.callback._torchdynamo_orig_backend, "_inner_convert")


def backend_of(context: Any) -> Any:
    """Returns the innermost backend of Dynamo's decorator."""
    return _unwrapped(context.callback)


def has_compiled_graphs(context: Any, otherwise: Collection[int]) -> bool:
    """Returns whether Dynamo has compiled graphs for the decorator's backend.

    Args:
        context: The decorator.
        otherwise: Identities of code objects that do not count.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as entries_of

    backend = backend_of(context)
    return any(
        _unwrapped(entry.backend) == backend
        and any(name.startswith("__compiled_fn") for name in entry.code.co_names)
        for code in seen_codes()
        if id(code) not in otherwise
        for entry in entries_of(code)
    )


def is_dynamo_enabled() -> bool:
    """Returns whether Dynamo is enabled in this thread: stance, config, dispatch modes."""
    from torch._dynamo import config, convert_frame, eval_frame

    in_a_mode = convert_frame.is_in_any_mode_without_ignore_compile_internals()
    return eval_frame._stance.stance == "default" and not (config.disable or in_a_mode)


_reuse = SharedPatch()


def watch_code_reuse(told: Callable[[], None]) -> Callable[[], None]:
    """Calls `told` whenever guards admit compiled code; returns the function that stops it.

    Args:
        told: The same function in every use.

    Returns:
        What ends it.
    """

    def change() -> Callable[[], None]:
        from torch._C._dynamo import eval_frame

        def hook(admitted: bool) -> Any:
            if admitted:
                told()
            return admitted if prior is None else prior(admitted)

        set_hook: Any = eval_frame.set_guard_complete_hook
        prior = set_hook(hook)

        def undo() -> None:
            set_hook(prior)

        return undo

    return _reuse.acquire(change)


def seen_codes() -> list[CodeType]:
    """Returns the code objects that Dynamo has seen in this process and that still live."""
    from torch._dynamo.convert_frame import input_codes

    return [code for ref in input_codes.seen if (code := ref()) is not None]


def retry_skipped(codes: Collection[CodeType]) -> None:
    """Makes Dynamo look again at code objects that it decided to skip."""
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    strategy = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)
    for code in codes:
        set_code_exec_strategy(code, strategy)


@contextlib.contextmanager
def fresh_shape_history() -> Iterator[None]:
    """Hides and then restores Dynamo's record of varying sizes (context manager)."""
    from torch._dynamo import pgo

    before = pgo._CODE_STATE, pgo._INIT_CODE_STATE
    pgo._CODE_STATE = pgo._INIT_CODE_STATE = None
    try:
        yield
    finally:
        pgo._CODE_STATE, pgo._INIT_CODE_STATE = before


def graph_break_reasons() -> list[Any]:
    """Returns all graph breaks of this process, with `reason` and `user_stack`."""
    from torch._dynamo.utils import graph_break_reasons as reasons

    return reasons


def is_unsupported(error: BaseException) -> bool:
    """Returns whether an error makes Dynamo run the whole frame in eager."""
    from torch._dynamo.exc import Unsupported, UserError

    return isinstance(error, Unsupported | UserError)


def retry_frame_later(error: Any) -> None:
    """Tells Dynamo to retry the frame that raised an error at its next call."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy

    error.frame_exec_strategy = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)


def backend_function(name: str) -> Callable[..., Any]:
    """Returns the registered function that compiles `(graph module, inputs)`."""
    from torch._dynamo.backends.registry import lookup_backend

    found: Callable[..., Any] = lookup_backend(name)
    return found
