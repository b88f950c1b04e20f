"""Shows the progress of tuning on a terminal, and counts what it has done."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dynamo_backends.interface.counters import Counted


class Progress:
    """A line on standard error that shows the progress.

    Args:
        task: The line, or None where nobody would see it.

    Attributes:
        wants_leader: Whether `leads` is of use.
    """

    wants_leader = False

    def __init__(self, task: Any = None):
        self._task = task

    def __call__(self, what: str) -> None:
        """Says what is going on."""
        if self._task is not None:
            display, number = self._task
            display.update(number, description=what)

    def begins(self, name: str, number: int, of: int) -> None:
        """A candidate is compiled and verified next; here nobody is told.

        Args:
            name: Name of the candidate; empty: all that are left are measured.
            number: Among the candidates, from 1.
            of: How many there are.
        """

    def ended(self, row: Any) -> None:
        """Reports the end of a compilation; here nobody is told."""

    def leads(self, name: str) -> None:
        """A candidate is right and clearly faster than eager; others are still to be tried.

        Args:
            name: Name of the candidate.
        """


_active: list[Progress] = []


@contextmanager
def showing(title: str) -> Iterator[Progress]:
    """A progress line inside the block, if standard error is a terminal.

    Args:
        title: What is tuned.
    """
    if _active or not sys.stderr.isatty():
        yield _active[0] if _active else Progress()
        return
    from rich.console import Console
    from rich.progress import Progress as Display
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Display(*columns, console=Console(stderr=True), transient=True) as display:
        progress = Progress((display, display.add_task(title, total=None)))
        _active.append(progress)
        try:
            yield progress
        finally:
            _active.pop()


@dataclass
class Counts(Counted):
    """The counters of autotune in this process.

    Attributes:
        sessions: Graphs for which candidates were compared.
        remembered: Graphs for which a decision was found on disk.
        compiled: Candidates that were compiled, eager not among them.
        verified: Candidates that were compared with eager.
        samples: Timings that were taken.
        replaced: Chosen candidates that failed later and were replaced.
    """

    sessions: int = 0
    remembered: int = 0
    compiled: int = 0
    verified: int = 0
    samples: int = 0
    replaced: int = 0


COUNTS = Counts()
