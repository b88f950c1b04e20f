"""Shows the progress of tuning in a terminal, a notebook or the log; counts what it has done."""

import contextlib
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dynamo_backends.interface.counters import CounterBase

log = logging.getLogger("dynamo_backends")

Show = Callable[[str, float | None], None]
"""Shows a line, and how many seconds there are for what it says, if that is known."""


class Progress:
    """Shows what is going on, in one line.

    Args:
        show: Shows it; None where nobody would see it.

    Attributes:
        wants_leader: Whether `leads` is of use.
    """

    wants_leader = False

    def __init__(self, show: Show | None = None):
        self._show = show

    def __call__(self, what: str, left_s: float | None = None) -> None:
        """Says what is going on.

        Args:
            what: It.
            left_s: Seconds that are left.
        """
        if self._show is not None:
            self._show(what, left_s)

    def begins(self, name: str, number: int, of: int) -> None:
        """A candidate is compiled and verified next; here nobody is told.

        Args:
            name: Name of the candidate; empty: all that are left are measured.
            number: Among the candidates, from 1.
            of: How many there are.
        """

    def ended(self, row: Any) -> None:
        """What became of it, before it is measured; here nobody is told."""

    def leads(self, name: str) -> None:
        """A candidate is right and clearly faster than eager; others are still to be tried.

        Args:
            name: Name of the candidate.
        """


_active: list[Progress] = []


@contextmanager
def showing(title: str) -> Iterator[Progress]:
    """Shows progress inside the block: in a terminal, in a notebook, or as lines of the log (INFO).

    Args:
        title: What is tuned.
    """
    if _active:
        yield _active[0]
        return
    with _display()(title) as show:
        _active.append(Progress(show))
        try:
            yield _active[0]
        finally:
            _active.pop()


def _display() -> Callable[[str], contextlib.AbstractContextManager[Show]]:
    shell = sys.modules.get("IPython")
    if shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets it is a line of text
            import tqdm.auto  # noqa: F401

            return _in_notebook
    return _in_terminal if sys.stderr.isatty() else _in_log


@contextmanager
def _in_terminal(title: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import Progress as Display
    from rich.progress import ProgressColumn, SpinnerColumn, Task
    from rich.text import Text

    class Line(ProgressColumn):
        """The seconds that are left, or have passed where nobody knows, and what goes on."""

        def render(self, task: Task) -> Text:
            ends, passed = task.fields["ends"], f"{task.elapsed or 0:.0f} s"
            seconds = passed if ends is None else _left(ends - time.monotonic())
            return Text(f"{seconds}  {task.description}", no_wrap=True, overflow="ellipsis")

    columns = SpinnerColumn(), Line()
    with Display(*columns, console=Console(stderr=True), transient=True) as display:
        number = display.add_task(title, total=None, ends=None)

        def show(what: str, left_s: float | None) -> None:
            ends = None if left_s is None else time.monotonic() + left_s
            display.update(number, description=what, ends=ends)

        yield show


@contextmanager
def _in_notebook(title: str) -> Iterator[Show]:
    from tqdm.auto import tqdm

    with tqdm(desc=title, bar_format="{desc} [{elapsed}]", leave=False) as bar:
        yield lambda what, left_s: bar.set_description_str(_line(what, left_s))


@contextmanager
def _in_log(title: str) -> Iterator[Show]:
    said = ""

    def show(what: str, left_s: float | None) -> None:
        nonlocal said
        step = re.sub(r", round \d+", "", what)
        if step != said:
            log.info("%s", _line(step, left_s))
        said = step

    yield show


def _line(what: str, left_s: float | None) -> str:
    return what if left_s is None else f"{what}; {_left(left_s)}"


def _left(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s left"


@dataclass
class Counts(CounterBase):
    """What autotune did in this process.

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
