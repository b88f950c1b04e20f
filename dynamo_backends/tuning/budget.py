"""How long this process may tune."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Seconds that are spent by whoever tunes, also by graphs inside of graphs, only once.

    Args:
        total_s: Seconds in all.
    """

    def __init__(self, total_s: float):
        self.total_s = total_s
        self._spent = 0.0
        self._since: float | None = None
        self._depth = 0
        self._told = False
        self._lock = threading.RLock()

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 if it is overdrawn."""
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return max(0.0, self.total_s - self._spent - running)

    def tell(self) -> bool:
        """Whether to tell the user that it does not last: True once."""
        told, self._told = self._told, True
        return not told

    @contextmanager
    def spending(self) -> Iterator[None]:
        """The time inside the block counts. Other threads wait: measuring needs quiet."""
        with self._lock:
            if self._depth == 0:
                self._since = time.perf_counter()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._since is not None:
                    self._spent += time.perf_counter() - self._since
                    self._since = None


_budgets: dict[tuple[str, float], Budget] = {}


def budget_of(options: str, total_s: float) -> Budget:
    """The one budget of this process for these options.

    Args:
        options: What tells sets of options apart.
        total_s: Seconds in all.
    """
    return _budgets.setdefault((options, total_s), Budget(total_s))


def renew() -> None:
    """Makes every budget whole again, as in a new process."""
    _budgets.clear()
