"""Compiled steps: run once, they update their inputs in place and hand over the rest."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from dynamo_backends.graph.aliasing import find_view_base
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.runtime.atomic_copies import copy_atomically

RUN = 3  # steps in a row; the first finds threads asleep, and the caches and memory of another
RUNS = 4  # of each; the first one, in which code is still new, does not count either
STEPS = RUN * RUNS  # of each
WORTH = 0.98  # eager must take at most this part of the compiled step's time


@dataclass
class OnlineComparison:
    """Times compiled programs and eager in turn on real steps, to choose the fastest.

    All take the same step, so none is lost by comparing.

    Attributes:
        settle: Called once with the median seconds of each compiled step, infinite for those that
            gave up, and of eager.
        compiled: Seconds of the steps of each one that is compiled.
        eager: Seconds of each step in eager.
    """

    settle: Callable[[Sequence[float], float], None]
    compiled: Sequence[list[float]] = field(default_factory=lambda: [[]])
    eager: list[float] = field(default_factory=list)

    @property
    def next_program(self) -> int | None:
        """The index of the compiled program that runs the next step; None stands for eager."""
        due = len(self.eager) // RUN * RUN + RUN
        return next((i for i, steps in enumerate(self.compiled) if len(steps) < due), None)

    def note_seconds(self, turn: int | None, seconds: float) -> None:
        """Records the seconds of the last step, and which program ran it."""
        (self.eager if turn is None else self.compiled[turn]).append(seconds)
        if len(self.eager) == STEPS:
            self.settle([_typical(steps) for steps in self.compiled], _typical(self.eager))

    def give_up(self, turn: int) -> None:
        """One of the compiled ones has no more turns, and loses."""
        self.compiled[turn][:] = [math.inf] * STEPS


def drop_warmup_times(steps: Sequence[float]) -> list[float]:
    """Drops the first run's times, and the first step of each later run."""
    return [s for i, s in enumerate(steps) if i >= RUN and i % RUN]


def _typical(steps: Sequence[float]) -> float:
    return statistics.median(drop_warmup_times(steps))


def eager_wins(compiled: float, eager: float) -> bool:
    """Returns whether eager's time is so much shorter that it is chosen."""
    return eager < WORTH * compiled


class CopyingProgram(StepProgram):
    """A functional program whose results are copied to where they belong, all in one call."""

    def __init__(self, graph: Graph, run: Callable[[list[Tensor]], Sequence[Any]]):
        self._run = run
        self._updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self._borrowed = [i for i, x in enumerate(graph.outputs) if is_borrowed(x)]

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        count = len(self._updated)
        # Not torch.no_grad(), which a signal at the wrong moment would leave on.
        apart = [x.detach() for x in inputs]
        self.launches += 1
        results = list(self._run(list(apart)))  # some programs empty the list
        for i in self._borrowed:
            results[i] = results[i].clone()
        copy_atomically([apart[i] for i in self._updated], results[:count], taken, results[count:])

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        return taken[0]


def is_borrowed(output: Any) -> bool:
    """Returns whether an output shares memory with an input that a step may overwrite."""
    return isinstance(output, fx.Node) and find_view_base(output).op == "placeholder"
