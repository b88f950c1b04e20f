"""A bound on what a device has been asked for and has not done yet."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

MOST = 32
"""So many programs may be on their way. Each holds its results and what it reads."""


class InFlight:
    """The programs that a device was given.

    Args:
        most: So many may be unfinished when the next one is given to it.
        wait: Waits for an array.
    """

    def __init__(self, most: int = MOST, wait: Callable[[Any], Any] | None = None):
        self._most = most
        self._wait = wait or (lambda array: array.block_until_ready())
        self._launched: deque[Any] = deque()

    def note(self, results: Sequence[Any]) -> None:
        """Notes a launch; waits for the oldest ones if there are too many.

        Args:
            results: Arrays that the program makes; the smallest is held until it is waited for.
        """
        if results:
            self._launched.append(min(results, key=lambda array: array.size))
        self._keep(self._most)

    def drain(self) -> None:
        """Waits for all."""
        self._keep(0)

    def _keep(self, most: int) -> None:
        while len(self._launched) > most:
            oldest = self._launched.popleft()
            with contextlib.suppress(Exception):  # whoever reads a result is told
                if not oldest.is_deleted():
                    self._wait(oldest)
