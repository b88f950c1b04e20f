"""Patches what bypasses torch's function modes: optimizers, autograd functions, seeds."""

import contextlib
import gc
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch

from dynamo_backends._torch_private import amp_scaling
from dynamo_backends._torch_private.autograd_nodes import GENERATOR, graph_task
from dynamo_backends._torch_private.functorch import (
    DUAL_LEVELS,
    GRADIENTS,
    NESTINGS,
    OTHERS,
    PULLBACKS,
    is_transforming,
)
from dynamo_backends._torch_private.pending_tensors import FOREACH_TYPES, PYTHON_FUNCTIONS
from dynamo_backends._torch_private.step_hooks import ENGINE
from dynamo_backends.aot.step.backward.checkpoints import (
    GeneratorState,
    region,
    restore_rng_state,
    rng_state_for_checkpoint,
)
from dynamo_backends.aot.step.backward.tape import GraphNode
from dynamo_backends.aot.step.record.autograd_functions import apply as apply_function
from dynamo_backends.aot.step.record.autograd_functions import why_not_followed
from dynamo_backends.aot.step.record.interpreter import without_hooks
from dynamo_backends.aot.step.record.placeholders import Placeholder
from dynamo_backends.aot.step.record.recorder import COMMUNICATES
from dynamo_backends.aot.step.record.session import Session
from dynamo_backends.aot.step.record.transforms import TransformedCalls
from dynamo_backends.aot.step.state.unsupported_hooks import has_global_hooks

_thread = threading.local()


def current_session() -> Session | None:
    """Returns the call of a step that this thread is in."""
    return getattr(_thread, "session", None)


def set_session(session: Session | None) -> None:
    """Begins a call of a step in this thread, or ends it."""
    _thread.session = session


def active_session() -> Session | None:
    """Returns the call of a step that this thread is in, if its torch calls are followed."""
    session = current_session()
    return session if session is not None and session.is_active else None


def session_of_region() -> Session | None:
    """As `active_session`, or that of a checkpointed region that goes on in eager."""
    session = current_session()
    return session if session is not None and session.is_active_or_in_region else None


def open_transforms() -> TransformedCalls | None:
    """Returns the transforms of torch.func that this thread's step is in."""
    session = current_session()
    return session.transforms if session is not None and session.transforms.is_open else None


def gc_callback(phase: str, info: Any) -> None:
    """Notes in the session that garbage collection begins or ends (`gc.callbacks`)."""
    session = current_session()
    if session is not None:
        session.collecting = phase == "start"


_SEEDS = (
    (torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "seed"), (torch.random, "seed"),
    (torch, "get_rng_state"), (torch.random, "get_rng_state"), (torch, "set_rng_state"),
    (torch.random, "set_rng_state"),
)  # fmt: skip


class Patches:
    """While a step is called: its optimizers' methods, and functions of torch, tell the session."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._is_in = False
        self._methods = [
            _Method(optimizer, name, make(optimizer))
            for optimizer in optimizers
            if is_one_entry(optimizer)
            for name, make in (("step", _stepping), ("zero_grad", _clearing))
        ]
        self._fused = [o for o in optimizers if is_one_entry(o) and amp_scaling.unscales_in_step(o)]

    def enter(self, session: Session) -> None:
        """Begins a call."""
        self._is_in = True
        set_session(session)
        for method in self._methods:
            method.install()
        for optimizer in self._fused:
            amp_scaling.set_unscales(optimizer, False)
        _FUNCTIONS.enter(self)

    def exit(self) -> None:
        """Ends it; may be called again, as after an interruption."""
        if not self._is_in:
            return
        set_session(None)
        _FUNCTIONS.exit(self)
        for optimizer in self._fused:
            amp_scaling.set_unscales(optimizer, True)
        for method in self._methods:
            method.restore()
        self._is_in = False


class _Method:
    """A method of an optimizer, and what takes its place during a call."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, replacement: Any):
        self._optimizer = optimizer
        self._name = name
        self._replacement = replacement
        self._own = self._of_class = _MISSING

    def install(self) -> None:
        """Puts the replacement in its place, unless there is a method of the user's."""
        attributes = vars(self._optimizer)
        own = attributes.get(self._name, _MISSING)
        if own is self._replacement:
            return
        of_class = getattr(type(self._optimizer), self._name)
        if own is not self._own or of_class is not self._of_class:
            if own is not _MISSING and not hasattr(own, "_wrapped_by_lr_sched"):
                return  # the user's, whose Python runs at every call
            original = getattr(self._optimizer, self._name)
            vars(self._replacement).update(vars(getattr(original, "__func__", original)))
            self._replacement.original = original
            self._own, self._of_class = own, of_class
        attributes[self._name] = self._replacement

    def restore(self) -> None:
        """Puts the method back, if it was replaced and is not another one by now."""
        attributes = vars(self._optimizer)
        if attributes.get(self._name) is not self._replacement:
            return
        if self._own is _MISSING:
            del attributes[self._name]
        else:
            attributes[self._name] = self._own


_MISSING: Any = object()


def is_one_entry(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer's step is recorded as one call."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    return is_torchs and not isinstance(optimizer, torch.optim.LBFGS)


def _stepping(optimizer: Any) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        original = step.original  # type: ignore[attr-defined]
        session = active_session()
        closure = args[0] if args else kwargs.get("closure")
        if session is None or kwargs.keys() - {"closure"} or has_global_hooks():
            return original(*args, **kwargs)
        loss = None
        for hook in optimizer._optimizer_step_pre_hooks.values():
            hook(optimizer, args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer._opt_called = True
        session.optimizer("optimizer", optimizer, (), {}, lambda: _step_alone(optimizer))
        for hook in optimizer._optimizer_step_post_hooks.values():
            hook(optimizer, args, kwargs)
        return loss

    return step


def _step_alone(optimizer: Any) -> None:
    with without_hooks(optimizer):
        optimizer.step()


def _is_followed(optimizer: Any) -> bool:
    """Returns whether a step of an optimizer is one call now, without hooks."""
    step = vars(optimizer).get("step")
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return getattr(step, "__code__", None) is _STEP and not hooks and not has_global_hooks()


_STEP = next(c for c in _stepping.__code__.co_consts if isinstance(c, CodeType))


def _scaling(original: Any, name: str) -> Callable[..., Any]:
    """A scaler reads whether gradients overflowed, and takes an optimizer's step if not."""

    def take_step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        session = active_session()
        if session is None or args or kwargs or not _is_followed(optimizer):
            return original(scaler, optimizer, state, *args, **kwargs)
        optimizer._opt_called = True
        overflows = tuple(state[amp_scaling.OVERFLOWS].values())
        run = lambda: amp_scaling.step_without_overflow(optimizer, overflows)  # noqa: E731
        session.optimizer("optimizer", optimizer, overflows, {}, run)
        return None

    return take_step


def _clearing(optimizer: Any) -> Callable[..., Any]:
    def zero_grad(*args: Any, **kwargs: Any) -> Any:
        original = zero_grad.original  # type: ignore[attr-defined]
        session = active_session()
        if session is None:
            return original(*args, **kwargs)
        return session.optimizer(
            "zero_grad", optimizer, args, kwargs, lambda: original(*args, **kwargs)
        )

    return zero_grad


class _Replacements:
    """Functions of modules and classes, and what takes their places during a call.

    Args:
        makers: For each module or class, and each name in it, what makes the replacement, from the
            function and its name.
    """

    def __init__(self, makers: Mapping[Any, Mapping[str, Callable[[Any, str], Any]]]):
        self._places = [(owner, name) for owner, each in makers.items() for name in each]
        self._makers = [make for each in makers.values() for make in each.values()]
        self._tables = [vars(owner) for owner, _ in self._places]
        self._names = [name for _, name in self._places]
        self._old: list[Any] = []
        self._new: list[Any] = []
        self._installs: list[Callable[[], None]] = []
        self._restores: list[Callable[[], None]] = []

    def _read(self) -> list[Any]:
        return list(map(operator.getitem, self._tables, self._names))

    def install(self) -> None:
        """Puts the replacements in their places."""
        now = self._read()
        if now != self._old:
            self._make_replacements(now)
        for install in self._installs:
            install()

    def _make_replacements(self, now: list[Any]) -> None:
        for i, new in enumerate(self._new):
            if now[i] is new:  # an interruption has left it there
                now[i] = self._old[i]
        self._old = now
        self._new = [
            make(old, name) for make, old, name in zip(self._makers, now, self._names, strict=True)
        ]
        self._installs = self._writes(self._new)
        self._restores = self._writes(self._old)

    def restore(self) -> None:
        """Puts the functions back, except for those that are others by now."""
        now = self._read()
        if now == self._new:
            for restore in self._restores:
                restore()
            return
        for (owner, name), function, old, new in zip(
            self._places, now, self._old, self._new, strict=False
        ):
            if function is new:
                setattr(owner, name, old)

    def _writes(self, functions: list[Any]) -> list[Callable[[], None]]:
        """Writes functions to their places: all of a module's at once."""
        several: dict[Any, dict[str, Any]] = {}
        for (owner, name), function in zip(self._places, functions, strict=True):
            several.setdefault(owner, {})[name] = function
        return [
            partial(vars(owner).update, each)
            if isinstance(vars(owner), dict)
            else partial(_set_all, owner, each)
            for owner, each in several.items()
        ]


def _set_all(owner: type, functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)


class _Functions:
    """The functions of torch that are other ones while any thread is in a step.

    They are put there at each call, which takes a few microseconds, and not for as long as
    there are steps: at all other times torch is as it was, for what traces it, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[Any] = set()
        make: Any
        makers: dict[Any, dict[str, Any]] = {}
        for owner, name in _SEEDS:
            makers.setdefault(owner, {})[name] = _cutting
        for places, make in TRANSFORM_PATCHES:
            for owner, name in places:
                makers.setdefault(owner, {})[name] = make
        for owner in PYTHON_FUNCTIONS:
            makers.setdefault(owner, {})["handle_torch_function"] = _handling
        for (owner, name), make in zip(ENGINE, (_numbering, _asking, _Engine), strict=True):
            makers.setdefault(owner, {})[name] = make
        for owner, name in _unseen_collectives():
            makers.setdefault(owner, {})[name] = _communicating
        owner, name = GENERATOR
        makers.setdefault(owner, {})[name] = _checkpointing
        makers[torch.autograd.Function] = {"apply": _applying}
        makers[amp_scaling.GradScaler] = {amp_scaling.TAKES_STEP: _scaling}
        self._replacements = _Replacements(makers)

    def enter(self, user: Any) -> None:
        """One more step is being called."""
        with self._lock:
            self._users.add(user)
            if len(self._users) > 1:
                return
            FOREACH_TYPES.append(Placeholder)
            gc.callbacks.append(gc_callback)
            self._replacements.install()

    def exit(self, user: Any) -> None:
        """Notes the end of a call; a signal may have come before or after."""
        with self._lock:
            self._users.discard(user)
            if self._users:
                return
            if gc_callback in gc.callbacks:
                gc.callbacks.remove(gc_callback)
            if Placeholder in FOREACH_TYPES:
                FOREACH_TYPES.remove(Placeholder)
            self._replacements.restore()


def _cutting(original: Any, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], GeneratorState):
            return restore_rng_state(args[0].number)
        transforms = open_transforms()
        if transforms is not None:
            transforms.refuse(f"calls torch.{name} inside a torch.func transform")
        session = active_session()
        if session is not None:
            state = rng_state_for_checkpoint(session) if name == "get_rng_state" else None
            if state is not None:
                return state
            session.cut(f"calls torch.{name}")
        return original(*args, **kwargs)

    return call


_COLLECTIVES = (
    "broadcast", "reduce", "all_reduce", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "send", "recv", "isend", "irecv",
)  # fmt: skip


def _unseen_collectives() -> Iterator[tuple[Any, str]]:
    """Yields the functions of torch.distributed that do not reach modes: on torch 2.11 most."""
    if not torch.distributed.is_available():
        return
    for name in _COLLECTIVES:
        function = inspect.unwrap(getattr(torch.distributed, name))
        if "has_torch_function" not in function.__code__.co_names:
            yield torch.distributed, name


def _communicating(original: Any, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        session = active_session()
        if session is not None:
            session.go_eager(COMMUNICATES.format(name))
        return original(*args, **kwargs)

    return call


def _open_passes() -> Any:
    """The backward passes that this thread is in; None: of autograd's own engine, or none."""
    session = current_session()
    return session.nested if session is not None and session.nested.is_open else None


def _numbering(original: Any, name: str) -> Callable[[], int]:
    def current_graph_task_id() -> int:
        task: int = original()
        passes = _open_passes() if task == -1 else None
        return task if passes is None else int(passes.task)

    return current_graph_task_id


def _asking(original: Any, name: str) -> Callable[[Any], bool]:
    def will_engine_execute_node(node: Any) -> bool:
        passes = _open_passes() if graph_task() == -1 else None
        if passes is not None:
            return bool(passes.asks_for(node))
        return bool(original(node.real if isinstance(node, GraphNode) else node))

    return will_engine_execute_node


class _Engine:
    """Stands in for autograd's engine, so that a pass that is divided has callbacks, too."""

    def __init__(self, original: Any, name: str):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def queue_callback(self, callback: Callable[[], Any]) -> None:
        passes = _open_passes() if graph_task() == -1 else None
        if passes is None:
            self._original.queue_callback(callback)
        else:
            passes.queue_callback(callback)


def _checkpointing(original: Any, name: str) -> Callable[..., Any]:
    def generator(*args: Any, **kwargs: Any) -> Any:
        session = session_of_region()
        if session is None:
            return original(*args, **kwargs)
        return region(session, original, *args, **kwargs)

    return generator


def _handling(original: Any, name: str) -> Any:
    """Torch's own takes the mode from the stack by a generator, for each call."""

    def handle_torch_function(api: Any, relevant: Any, /, *args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is None or not session.is_innermost:
            return original(api, relevant, *args, **kwargs)
        result = session.handle(api, args, kwargs)
        if result is not NotImplemented:
            return result
        with session.aside():
            return original(api, relevant, *args, **kwargs)

    return handle_torch_function


def _applying(original: Any, name: str) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        transforms = open_transforms()
        if transforms is not None and not is_transforming():
            return transforms.apply(cls, args, kwargs)
        session = session_of_region()
        if session is None:
            return original.__get__(None, cls)(*args, **kwargs)
        reason = why_not_followed(cls, kwargs)
        if reason:
            session.go_eager(f"calls an autograd.Function ({cls.__name__}) {reason}")
            return original.__get__(None, cls)(*args, **kwargs)
        return apply_function(session, cls, args, kwargs)

    return classmethod(apply)


def _before_transform() -> Session | None:
    """Returns the call of a step that begins a transform now, in code of the user's."""
    session = active_session()
    return session if session is not None and session.is_innermost else None


def _region() -> contextlib.AbstractContextManager[Any]:
    session = _before_transform()
    return contextlib.nullcontext() if session is None else session.transforms.region()


def _nesting(original: Any, name: str) -> Callable[..., Any]:
    @contextlib.contextmanager
    def nesting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with _region(), original(*args, **kwargs) as level:
            yield level

    return nesting


def _differentiating(original: Any, name: str) -> Callable[..., Any]:
    def autograd_grad(*args: Any, **kwargs: Any) -> Any:
        with _region():
            return original(*args, **kwargs)

    return autograd_grad


def _pulling_back(original: Any, name: str) -> Callable[..., Any]:
    def vjp(*args: Any, **kwargs: Any) -> Any:
        session = _before_transform()
        result = original(*args, **kwargs)
        if session is not None:
            session.transforms.add_pullback(result[1])
        return result

    return vjp


def _eager(original: Any, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        session, transforms = _before_transform(), open_transforms()
        reason = "uses a torch.func transform that compile_step does not support"
        if session is not None:
            session.go_eager(reason)
        elif transforms is not None:
            transforms.refuse(reason)
        return original(*args, **kwargs)

    return call


def _forwards(original: Any, name: str) -> Callable[..., Any]:
    def enter_dual_level() -> Any:
        session = _before_transform()
        if session is not None:
            session.go_eager("uses torch.autograd.forward_ad")
        return original()

    return enter_dual_level


TRANSFORM_PATCHES = (
    (NESTINGS, _nesting), (GRADIENTS, _differentiating), (PULLBACKS, _pulling_back),
    (OTHERS, _eager), (DUAL_LEVELS, _forwards),
)  # fmt: skip
"""Functions of torch at which transforms begin, each with what makes its replacement."""

_FUNCTIONS = _Functions()
