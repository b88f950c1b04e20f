"""Limits the time that this process may spend on tuning."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dynamo_backends._torch_private.forks import fork_safe_rlock


class Budget:
    """Seconds that are spent by whoever tunes, also by graphs inside of graphs, only once.

    Args:
        total_s: Seconds in all.
        spent_s: How many of them are gone.
        clock: Tells seconds; by default those that pass.
        owes: Whether something is to come of it in any case.

    Attributes:
        owes: Whether nothing has come of it yet: what is begun is ended, however long it takes.
    """

    def __init__(
        self,
        total_s: float,
        spent_s: float = 0.0,
        clock: Callable[[], float] | None = None,
        owes: bool = True,
    ):
        self.total_s = total_s
        self.owes = owes
        self._has_come = False
        self._spent = spent_s
        self.clock = clock or time.perf_counter
        self._since: float | None = None
        self._depth = 0
        self._told = False
        self._ends_s = total_s  # of the share that is being spent
        self._share_s = 0.0
        self._lock = fork_safe_rlock()

    @property
    def left_s(self) -> float:
        """Seconds that are left, of the share inside of `sharing`; 0 if it is overdrawn."""
        return max(0.0, min(self.total_s, self._ends_s) - self.spent_s)

    @property
    def share_s(self) -> float:
        """Seconds of the share that is being spent; 0: all that is left may be."""
        return self._share_s

    @contextmanager
    def sharing(self, seconds: float) -> Iterator[None]:
        """Inside the block at most so many seconds may be spent; less in a block inside another.

        Args:
            seconds: From now on; no share where no more than that is left anyway.
        """
        before = self._ends_s, self._share_s
        if seconds < self.left_s:
            self._ends_s, self._share_s = self.spent_s + seconds, seconds
        try:
            yield
        finally:
            self._ends_s, self._share_s = before

    @property
    def spent_s(self) -> float:
        """Seconds that are gone."""
        running = self.clock() - self._since if self._since is not None else 0.0
        return self._spent + running

    def spend(self, seconds: float) -> None:
        """Counts what was spent elsewhere."""
        self._spent += seconds

    def finished(self) -> None:
        """Notes that something has come of it; what is being spent on now is ended first."""
        self._has_come = True
        self.owes = self.owes and self._depth > 0

    def tell(self) -> bool:
        """Returns whether to tell the user that it does not last: True once."""
        told, self._told = self._told, True
        return not told

    @contextmanager
    def spending(self) -> Iterator[None]:
        """The time inside the block counts. Other threads wait: measuring needs quiet."""
        with self._lock:
            if self._depth == 0:
                self._since = self.clock()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._since is not None:
                    self._spent += self.clock() - self._since
                    self._since = None
                    self.owes = self.owes and not self._has_come


def cpu_s() -> float:
    """Seconds of processors that this process and those that it waited for have used."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


_budgets: dict[tuple[str, float], Budget] = {}


def budget_of(options: str, total_s: float) -> Budget:
    """Returns the one budget of this process for these options.

    Args:
        options: What tells sets of options apart.
        total_s: Seconds in all.
    """
    return _budgets.setdefault((options, total_s), Budget(total_s))


def share_budget(options: str, budget: Budget) -> None:
    """Registers another process's budget as this process's for these options.

    Args:
        options: What tells sets of options apart.
        budget: Budget of another process, of which this one uses a part.
    """
    _budgets[options, budget.total_s] = budget


def renew() -> None:
    """Resets every budget of the process, as in a new one."""
    _budgets.clear()
