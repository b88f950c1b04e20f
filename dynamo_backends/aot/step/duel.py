"""A compiled step against the function itself in eager: real steps are taken in turns."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

WARMUP = 2  # steps of each that do not count
ROUNDS = 7  # steps of each that do
WORTH = 0.98  # eager must take at most this part of the compiled step's time


@dataclass
class Duel:
    """Who takes the next step, until it is known who is faster.

    Both sides take the same step, so none is lost by comparing.

    Attributes:
        settle: Called once with the median seconds of the compiled step and of eager.
        compiled: Seconds of each compiled step.
        eager: Seconds of each step in eager.
    """

    settle: Callable[[float, float], None]
    compiled: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)

    @property
    def is_eagers_turn(self) -> bool:
        """Whether the next step is eager's."""
        return len(self.eager) < len(self.compiled)

    def note(self, seconds: float) -> None:
        """Notes how long the step took whose turn it was."""
        (self.eager if self.is_eagers_turn else self.compiled).append(seconds)
        if len(self.eager) == WARMUP + ROUNDS:
            self.settle(*(statistics.median(x[WARMUP:]) for x in (self.compiled, self.eager)))


def eager_wins(compiled: float, eager: float) -> bool:
    """Whether eager's time is so much shorter that it is chosen."""
    return eager < WORTH * compiled
