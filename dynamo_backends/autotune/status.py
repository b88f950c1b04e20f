"""Reports where background tuning stands: `tuning_status`, `wait_for_tuning`."""

import itertools
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any, Literal

from dynamo_backends.autotune.options import EAGER
from dynamo_backends.interface.report import GraphReport

log = logging.getLogger("dynamo_backends")

_LOOK_S = 0.5

State = Literal["queued", "tuning", "loading", "serving", "gave up"]


@dataclass(frozen=True)
class TuningStatus:
    """The state of the background tuning of one graph.

    Attributes:
        graph: Which one, in words.
        state: "queued": it waits for other graphs, or for other sizes; "tuning": another process
            tunes it; "loading": the winner is compiled or loaded here, and compared with eager;
            "serving": the winner runs the calls, which may be eager; "gave up": the calls stay in
            eager.
        candidate: Which one is compiled and verified; empty while those that are left are measured.
        number: Number of this candidate, from 1.
        of: How many candidates there are.
        spent_s: Seconds of the budget that are gone, for all graphs with these options.
        budget_s: Seconds of processors that may be spent, for all of them.
        meanwhile: Name of the candidate that runs the calls until tuning has ended; empty: eager.
        winner: Name of the candidate that was proven to be the fastest; empty before.
        reason: Why the calls stay in eager, if autotune gave up.
        sizes: For a graph with symbols: over which sizes the winner was chosen, and how many of the
            calls had them until then; empty if an earlier process chose it.
    """

    graph: str
    state: State = "queued"
    candidate: str = ""
    number: int = 0
    of: int = 0
    spent_s: float = 0.0
    budget_s: float = 0.0
    meanwhile: str = ""
    winner: str = ""
    reason: str = ""
    sizes: str = ""

    @property
    def is_settled(self) -> bool:
        """Returns whether the state is final: "serving" or "gave up"."""
        return self.state in ("serving", "gave up")

    def __str__(self) -> str:
        """Returns all of it but the graph, in one line."""
        spent = f"{self.spent_s:.1f} s of {self.budget_s:g} s used"
        spent += f", {self.meanwhile} runs calls meanwhile" if self.meanwhile else ""
        match self.state:
            case "tuning" if self.candidate:
                return f"tuning candidate {self.candidate} ({self.number} of {self.of}, {spent})"
            case "tuning" if self.of:
                return f"tuning: measuring the candidates ({spent})"
            case "tuning":
                return f"tuning: starting the tuning process ({spent})"
            case "loading":
                return f"winner {self.winner}: loading, and comparing with eager"
            case "serving":
                chosen = f", chosen over {self.sizes}" if self.sizes else ""
                return f"verified winner {self.winner} runs calls{chosen}"
            case "gave up":
                return f"gave up ({self.reason})"
        return self.state


_changed = threading.Condition()
_numbers = itertools.count()
_followed: "weakref.WeakValueDictionary[int, TrackedGraph]" = weakref.WeakValueDictionary()


class TrackedGraph:
    """A graph whose tuning status is logged, reported and waited for.

    Args:
        status: At the beginning.
        reports: Reports of the graph; their `tuning` says where it stands.
    """

    def __init__(self, status: TuningStatus, reports: list[GraphReport]):
        self.reports = reports
        self._status = status
        self._telling = threading.RLock()
        self._note()
        with _changed:
            _followed[next(_numbers)] = self
        log.info("autotune: %s: %s", status.graph, status)

    @property
    def status(self) -> TuningStatus:
        """Returns the status; "gave up" if the winner has failed in a call since."""
        status, report = self._status, self.reports[0]
        if status.state == "serving" and status.winner != report.chosen == EAGER:
            why = report.runtime_fallbacks[-1] if report.events else f"{status.winner} failed"
            return replace(status, state="gave up", reason=why)
        return status

    def update_status(self, level: int = logging.INFO, **fields: Any) -> None:
        """Sets fields of the status, logs it, and wakes up waiting threads; thread-safe.

        Whoever has waited for the change finds the log line written.

        Args:
            level: Level of the log line.
            fields: The values.
        """
        with self._telling:
            status = replace(self._status, **fields)
            if str(status) != str(self._status):
                log.log(level, "autotune: %s: %s", status.graph, status)
            with _changed:
                self._status = status
                self._note()
                _changed.notify_all()

    def give_up(self, reason: str, level: int = logging.WARNING) -> None:
        """Sets the state "gave up": the graph stays in eager."""
        self.update_status(level, state="gave up", reason=reason, candidate="")

    def reset_after_fork(self) -> None:
        """Replaces a lock that may be held by a thread of the parent process."""
        self._telling = threading.RLock()

    def _note(self) -> None:
        for report in self.reports:
            report.tuning = str(self._status)


def tuning_status() -> list[TuningStatus]:
    """Returns the background tuning status of each live graph of this process.

    Graphs that were dropped, such as by `torch.compiler.reset()`, are not listed.

    Examples:
        >>> for status in dynamo_backends.tuning_status():
        ...     print(status.graph, status)
        inference graph 1 with 12 operations: tuning candidate ov (2 of 5, 3.1 s of 120 s used)
    """
    with _changed:
        found = list(_followed.values())
    return [each.status for each in found]


def wait_for_tuning(timeout: float | None = None) -> bool:
    """Waits until background tuning of all graphs has ended, or the timeout has passed.

    For scripts; what serves need not wait.

    Args:
        timeout: Seconds; None: for as long as it takes.

    Returns:
        Whether it has ended.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with _changed:
        while not all(each.status.is_settled for each in list(_followed.values())):
            left = _LOOK_S if end is None else end - time.monotonic()
            if left <= 0:
                return False
            _changed.wait(min(left, _LOOK_S))  # a graph that is dropped says nothing
    return True


def _after_fork() -> None:
    global _changed
    _changed = threading.Condition()
    for each in list(_followed.values()):
        each.reset_after_fork()
        if not each.status.is_settled:
            each.give_up("this process was forked from the process that tunes", logging.INFO)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
