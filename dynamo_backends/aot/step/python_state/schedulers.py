"""Learning rate schedulers that are stepped inside of a step: they run for real, at each call.

A scheduler counts its steps and calculates in Python. In a trace both would happen once. So while a
step is traced a scheduler's `step` only notes the call. If it comes after the optimizer's own step,
the scheduler runs when the graph has run; if it comes before, then before the graph gets the
learning rate.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from dynamo_backends.interface.errors import StepCaptureError

Noted = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Schedulers:
    """The schedulers that a traced step uses.

    Args:
        optimizers: Of the step.
        line: Says the user's line.

    Attributes:
        sooner: Calls to be made before the graph runs.
        later: Calls to be made after it has run.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], line: Callable[[], str]):
        self.sooner: list[Noted] = []
        self.later: list[Noted] = []
        self._optimizers = optimizers
        self._line = line
        self._active = False
        self._taken: dict[int, tuple[LRScheduler, dict[str, Any]]] = {}
        self._stepped: set[int] = set()
        self._scheduled: dict[int, str] = {}

    def take(self, value: Any) -> None:
        """Makes an object known that the step uses: if it is a scheduler, its steps are noted."""
        if isinstance(value, LRScheduler) and id(value) not in self._taken:
            own = {k: v for k, v in vars(value).items() if k in ("step", "get_last_lr")}
            self._taken[id(value)] = value, own
            if self._active:
                self._patch(value)

    def _patch(self, scheduler: LRScheduler) -> None:
        def step(*args: Any, **kwargs: Any) -> None:
            self._note(scheduler, args, kwargs)

        def get_last_lr() -> list[Any]:
            raise StepCaptureError(
                f"the step asks a scheduler for its last learning rate at {self._line()}; "
                "schedulers run outside of the graph. Ask it after the step, or pass "
                'fallback="split".'
            )

        vars(scheduler).update(step=step, get_last_lr=get_last_lr)

    def _note(self, scheduler: LRScheduler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if id(optimizer) in self._stepped or any(isinstance(a, torch.Tensor) for a in args):
            self._scheduled[id(optimizer)] = self._line()
            self.later.append((_real_step(scheduler), args, kwargs))
        else:
            self.sooner.append((_real_step(scheduler), args, kwargs))

    def after_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step has run: with the learning rate that its scheduler had set."""
        if id(optimizer) in self._scheduled:
            raise StepCaptureError(
                "the step calls a learning rate scheduler between two steps of its optimizer, or "
                f"with a value that it computes before one (at {self._scheduled[id(optimizer)]}). "
                'Call the scheduler after the last of them, or pass fallback="split".'
            )
        self._stepped.add(id(optimizer))

    def __enter__(self) -> "Schedulers":
        """Begins to note."""
        self._active = True
        for scheduler, _ in self._taken.values():
            self._patch(scheduler)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the schedulers their own methods back."""
        self._active = False
        for scheduler, own in self._taken.values():
            for name in ("step", "get_last_lr"):
                vars(scheduler).pop(name, None)
            vars(scheduler).update(own)


def _real_step(scheduler: LRScheduler) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> None:
        scheduler.step(*args, **kwargs)

    return step
