"""What of a step reaches torch past its function modes: optimizers, autograd functions, seeds."""

import gc
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from dynamo_backends._torch_private import tables_of_global_hooks
from dynamo_backends._torch_private.checkpoints import GENERATOR
from dynamo_backends._torch_private.placeholders import FOREACH_TYPES, TRANSFORMS
from dynamo_backends.aot.step.replay.checkpoints import region
from dynamo_backends.aot.step.replay.generator_states import (
    GeneratorState,
    get_state,
    use_state,
)
from dynamo_backends.aot.step.replay.interpreter import step_without_hooks
from dynamo_backends.aot.step.replay.placeholders import Placeholder
from dynamo_backends.aot.step.replay.session import Session
from dynamo_backends.aot.step.replay.user_functions import apply as apply_function
from dynamo_backends.aot.step.replay.user_functions import why_not_followed
from dynamo_backends.runtime import freezing

_SEEDS = (
    (torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "seed"), (torch.random, "seed"),
    (torch, "get_rng_state"), (torch.random, "get_rng_state"), (torch, "set_rng_state"),
    (torch.random, "set_rng_state"),
)  # fmt: skip

_active = threading.local()


def active_session() -> Session | None:
    """The call of a step that this thread is in, if its torch calls are followed."""
    session: Session | None = getattr(_active, "session", None)
    return session if session is not None and session.is_active else None


def _note_collection(phase: str, info: Any) -> None:
    """Called by Python when it begins and ends to collect garbage, in the thread that does so."""
    session: Session | None = getattr(_active, "session", None)
    if session is not None:
        session.collecting = phase == "start"


class Patches:
    """While a step is called: its optimizers' methods, and functions of torch, tell the session.

    Args:
        optimizers: Of the step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = [
            (o, {"step": _stepping(o), "zero_grad": _clearing(o)})
            for o in optimizers
            if _is_one_entry(o)
        ]
        self._saved: list[tuple[Any, str, Any]] = []
        self._is_in = False

    def enter(self, session: Session) -> None:
        """Begins a call."""
        self._is_in = True
        _active.session = session
        for optimizer, methods in self._optimizers:
            for name, method in methods.items():
                own = vars(optimizer).get(name, _MISSING)
                if own is not _MISSING and not hasattr(own, "_wrapped_by_lr_sched"):
                    continue  # the user's, whose Python runs at every call
                self._saved.append((optimizer, name, own))
                method.original = getattr(optimizer, name)  # type: ignore[attr-defined]
                vars(method).update(vars(getattr(method.original, "__func__", method.original)))  # type: ignore[attr-defined]
                vars(optimizer)[name] = method
        _FUNCTIONS.enter(self)

    def exit(self) -> None:
        """Ends it; may be called again, as after an interruption."""
        if not self._is_in:
            return
        _active.session = None
        _FUNCTIONS.exit(self)
        for owner, name, value in self._saved:
            if value is _MISSING:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value
        self._saved.clear()
        self._is_in = False


_MISSING: Any = object()


def _is_one_entry(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of an optimizer is one call, and not the calls that it makes."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    return is_torchs and not isinstance(optimizer, torch.optim.LBFGS)


def has_global_hooks() -> bool:
    """Whether the user has hooks of all modules or optimizers of the process.

    Frozen weights have one of this package (`runtime.freezing`): a program of a step counts the
    versions of what it updates, which tells them as well.
    """
    hooks = chain.from_iterable(table.values() for table in _GLOBAL_HOOKS)
    return any(getattr(hook, "__module__", None) != freezing.__name__ for hook in hooks)


_GLOBAL_HOOKS = tables_of_global_hooks()


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
        session.optimizer("optimizer", optimizer, (), {}, lambda: step_without_hooks(optimizer))
        for hook in optimizer._optimizer_step_post_hooks.values():
            hook(optimizer, args, kwargs)
        return loss

    return step


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


class _Functions:
    """The functions of torch that are other ones while any thread is in a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[Any] = set()
        self._originals: list[tuple[Any, str, Any]] = []
        self._made: dict[tuple[int, str], tuple[Any, Any]] = {}

    def enter(self, user: Any) -> None:
        """One more step is being called."""
        with self._lock:
            self._users.add(user)
            if not self._originals:
                self._install()

    def exit(self, user: Any) -> None:
        """It is no more; a signal may have come before it was noted, or after."""
        with self._lock:
            self._users.discard(user)
            if not self._users and self._originals:
                self._restore()

    def _restore(self) -> None:
        if _note_collection in gc.callbacks:
            gc.callbacks.remove(_note_collection)
        if Placeholder in FOREACH_TYPES:
            FOREACH_TYPES.remove(Placeholder)
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def _install(self) -> None:
        function = torch.autograd.Function
        original = vars(function)["apply"]
        self._originals.append((function, "apply", original))  # first: see `enter`
        FOREACH_TYPES.append(Placeholder)
        gc.callbacks.append(_note_collection)
        for owner, name in _SEEDS:
            self._replace(owner, name, _cutting)
        self._replace(*GENERATOR, _checkpointing)
        for owner, name in TRANSFORMS:
            self._replace(owner, name, _eager)
        replacement: Any = self._replacement(function, "apply", original, _applying)
        function.apply = replacement  # type: ignore[method-assign]

    def _replace(self, owner: Any, name: str, make: Callable[[Any, str], Any]) -> None:
        original = getattr(owner, name)
        self._originals.append((owner, name, original))
        setattr(owner, name, self._replacement(owner, name, original, make))

    def _replacement(
        self, owner: Any, name: str, original: Any, make: Callable[[Any, str], Any]
    ) -> Any:
        known = self._made.get((id(owner), name))
        if known is None or known[0] is not original:
            known = self._made[id(owner), name] = original, make(original, name)
        return known[1]


_FUNCTIONS = _Functions()


def _cutting(original: Any, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], GeneratorState):
            return use_state(args[0].number)
        session = active_session()
        if session is not None:
            state = get_state(session) if name == "get_rng_state" else None
            if state is not None:
                return state
            session.cut(f"calls torch.{name}")
        return original(*args, **kwargs)

    return call


def _eager(original: Any, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        session = active_session()
        if session is not None:
            session.go_eager("uses a transform of torch.func")
        return original(*args, **kwargs)

    return call


def _checkpointing(original: Any, name: str) -> Callable[..., Any]:
    def generator(*args: Any, **kwargs: Any) -> Any:
        session = active_session()
        if session is None:
            return original(*args, **kwargs)
        return region(session, original, *args, **kwargs)

    return generator


def _applying(original: Any, name: str) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        session = active_session()
        if session is None:
            return original.__get__(None, cls)(*args, **kwargs)
        reason = why_not_followed(cls, kwargs)
        if reason:
            session.go_eager(f"calls an autograd.Function ({cls.__name__}) {reason}")
            return original.__get__(None, cls)(*args, **kwargs)
        return apply_function(session, cls, args, kwargs)

    return classmethod(apply)
