"""Follows the Python state of one trace: conditions before it, effects after it."""

import builtins
import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends._torch_private import FakeTensor
from dynamo_backends.aot.step.python_state import places as kinds
from dynamo_backends.aot.step.python_state.calls import StandInRefused
from dynamo_backends.aot.step.python_state.effects import (
    Call,
    Effect,
    ToLeaf,
    effects_of,
    value_of,
)
from dynamo_backends.aot.step.python_state.frames import FollowedFrames, is_user_code
from dynamo_backends.aot.step.python_state.ledger import Ledger
from dynamo_backends.aot.step.python_state.places import (
    ANY,
    ContentsGuard,
    Place,
    PlaceGuard,
)
from dynamo_backends.aot.step.python_state.schedulers import Schedulers
from dynamo_backends.interface.errors import StepCaptureError

_LIBRARIES = (str(Path(torch.__file__).parent),)


def is_library(file: str) -> bool:
    """Whether a file holds library code: torch's, Python's, or this package's."""
    return not is_user_code(file, _LIBRARIES)


@dataclass(frozen=True)
class Conditions:
    """What a trace found in Python, as far as it depends on that.

    Attributes:
        places: Whose values must be what they were.
        values: What they were.
        contents: Containers whose items must be what they were: place, container, items.
        promoted: Places whose numbers are inputs.
        tensors: Places whose tensors are inputs.
    """

    places: tuple[Place, ...]
    values: tuple[Any, ...]
    contents: tuple[tuple[Place, Any, list[Any]], ...]
    promoted: tuple[Place, ...]
    tensors: tuple[Place, ...]


class PythonGuard:
    """Whether the conditions of a trace hold."""

    def __init__(self, conditions: Conditions):
        self._places = PlaceGuard(conditions.places, conditions.values)
        self._contents = [
            ContentsGuard(container, items, place)
            for place, container, items in conditions.contents
        ]

    def changed(self) -> list[Place]:
        """Places that changed; of a container that changed, its own."""
        changed = self._places.changed()
        return changed + [c.place for c in self._contents if not c.holds()]


class Following:
    """One trace's account of Python.

    Args:
        function: The step function.
        models: Of the step.
        optimizers: Of the step.
        arguments: Objects among the arguments.
        promoted: Places whose numbers are inputs.
        line: Says the user's line.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        arguments: Iterable[Any],
        promoted: Sequence[Place],
        line: Callable[[], str],
    ):
        self._promoted = tuple(promoted)
        self.numbers = [place.get() for place in promoted]
        self._line = line
        self._said: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        roots = [*_modules(models), *optimizers, *arguments]
        self._ledger = Ledger(function, roots, is_library, line)
        self._schedulers = Schedulers(optimizers, line)
        self._ledger.objects.on_adopt = self._schedulers.take
        for root in self._ledger.objects:
            self._schedulers.take(root)
        self._frames = FollowedFrames(
            self._ledger, lambda file: not is_library(file), self._ledger.enter
        )

    def after_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step has run."""
        self._schedulers.after_step_of(optimizer)

    @contextlib.contextmanager
    def set_up(self, stand_ins: Sequence[Tensor]) -> Iterator[None]:
        """Inside: tensors stand in for numbers that are inputs; what is written is undone after."""
        try:
            for place, tensor in zip(self._promoted, stand_ins, strict=True):
                place.set(tensor)
                self._ledger.stand_ins[id(tensor)] = place
            with self._schedulers:
                yield
        finally:
            self._ledger.put_back()
            for place, number in zip(self._promoted, self.numbers, strict=True):
                place.set(number)

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Inside: user code runs that is to be followed."""
        try:
            with _printing_to(self._said), self._frames:
                yield
        except BaseException:
            self._raise_first()
            raise
        finally:
            self._ledger.forget_frames()
        self._raise_first()

    def _raise_first(self) -> None:
        """What the observer raised comes before what user code made of it."""
        error = self._frames.error
        if isinstance(error, StepCaptureError | StandInRefused):
            raise error
        if error is not None:
            raise StepCaptureError(
                f"the step's Python code could not be followed: {type(error).__name__}: {error} "
                f'(at {self._line()}). Pass fallback="split", and please report this.'
            ) from error

    def effects(self, to_leaf: ToLeaf) -> list[Effect]:
        """What is to be done at each call besides running the graph."""

        def checked(leaf: Any, name: str) -> Any:
            if not isinstance(leaf, Tensor) and not self._ledger.is_old(leaf) and holds_fakes(leaf):
                raise StepCaptureError(
                    f"the step keeps an object of type {type(leaf).__name__}, made of tensors that "
                    f"it computes, in {name}. Keep the tensors themselves (or lists, tuples or "
                    'dicts of them), or pass fallback="split".'
                )
            return to_leaf(leaf, name)

        effects = effects_of(self._ledger, checked)
        for function, args, kwargs in self._said:
            value = value_of((args, kwargs), self._ledger, checked, "what it prints")
            effects.append(Call(function, value))
        for function, args, kwargs in self._schedulers.later:
            value = value_of((args, kwargs), self._ledger, checked, "a scheduler's argument")
            effects.append(Call(function, value))
        return effects

    def first(self, to_leaf: ToLeaf) -> list[Effect]:
        """What is to be done before a call reads the optimizers' numbers."""
        return [
            Call(
                function, value_of((args, kwargs), self._ledger, to_leaf, "a scheduler's argument")
            )
            for function, args, kwargs in self._schedulers.sooner
        ]

    def places_of(self, tensors: Iterable[Tensor]) -> list[Place | None]:
        """Where tensors were read that are neither parameters, buffers nor state."""
        known: dict[int, Place] = {}
        for place, value in self._ledger.reads.values():
            if isinstance(value, Tensor):
                known.setdefault(id(value), place)
        for place, container, items in self._ledger.contents_read.values():
            keys = list(container) if isinstance(container, dict) else range(len(items))
            if isinstance(container, dict | list):
                for key, value in zip(keys, items[-len(keys) :] if len(keys) else [], strict=False):
                    if isinstance(value, Tensor):
                        known.setdefault(
                            id(value), Place(container, key, f"{place.name}[{key!r}]", place.line)
                        )
        return [known.get(id(t)) for t in tensors]

    def conditions(self, tensors: Sequence[Place]) -> Conditions:
        """What was found.

        Args:
            tensors: Places whose tensors are inputs.
        """
        taken = {place.identity for place in (*tensors, *self._promoted)}
        reads = [
            (place, value)
            for identity, (place, value) in self._ledger.reads.items()
            if identity not in taken and not _is_of_trace(value)
        ]
        followed = {(id(p.container), p.key) for p in (*tensors, *self._promoted) if _is_key(p.key)}
        contents = [
            (place, container, _without(container, items, followed))
            for place, container, items in self._ledger.contents_read.values()
        ]
        return Conditions(
            tuple(place for place, _ in reads),
            tuple(value for _, value in reads),
            tuple(contents),
            self._promoted,
            tuple(tensors),
        )


def _is_of_trace(value: Any) -> bool:
    """Whether a value that was read is what stands in for numbers or tensors."""
    return isinstance(value, FakeTensor | list | tuple) and holds_fakes(value)


def _is_key(key: Any) -> bool:
    return isinstance(key, int | str | float | bool)


def _without(container: Any, items: list[Any], followed: set[tuple[int, Any]]) -> list[Any]:
    """The items of a container, without those that are followed by themselves."""
    keys: list[Any] = list(range(len(items)))
    if isinstance(container, dict):
        keys = items[: len(items) // 2]
        keys = [ANY] * len(keys) + keys
    is_kept = isinstance(container, dict | list)
    return [
        kinds.ANY
        if isinstance(item, FakeTensor)
        or (is_kept and _is_key(key) and (id(container), key) in followed)
        else item
        for key, item in zip(keys, items, strict=True)
    ]


def holds_fakes(value: Any, depth: int = 3) -> bool:
    """Whether tensors of the trace are in an object, or in what it holds."""
    if isinstance(value, FakeTensor):
        return True
    if depth == 0 or isinstance(value, nn.Module | type | FunctionType):
        return False
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    else:
        inner = vars(value).values() if hasattr(value, "__dict__") else ()
    return any(holds_fakes(each, depth - 1) for each in inner)


def _modules(models: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for model in models:
        yield from model.modules()


@contextlib.contextmanager
def _printing_to(said: list[Any]) -> Iterator[None]:
    """Inside: what this thread's user code prints and logs is kept for later."""
    printing, logging_ = builtins.print, logging.Logger._log
    thread = threading.get_ident()

    def print_later(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            said.append((printing, args, kwargs))
        else:
            printing(*args, **kwargs)

    def log_later(logger: logging.Logger, *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(2).f_code.co_filename
        if threading.get_ident() == thread and not is_library(caller):
            said.append((functools.partial(logging_, logger), args, kwargs))
        else:
            logging_(logger, *args, **kwargs)

    builtins.print, logging.Logger._log = print_later, log_later  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.print, logging.Logger._log = printing, logging_  # type: ignore[method-assign]
