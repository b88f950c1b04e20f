"""A graph that another process tunes, and what that process says of it."""

import signal
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_backends.autotune.session import Outcome
from dynamo_backends.autotune.status import Followed
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.tuning.answering import Lost
from dynamo_backends.tuning.budget import Budget

_FROM_OUTSIDE = [getattr(signal, n, 0) for n in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")]


class NotWanted(Exception):
    """The graph is gone, or this process ends."""


class GaveUp(Exception):
    """The graph cannot be tuned; the message says why."""


@dataclass
class Task:
    """A graph that is to be tuned.

    Attributes:
        owner: Who serves it; once that is gone nobody wants it to be tuned.
        followed: Its status.
        budget: Of all graphs with the same options.
        prepare: Writes the graph and its inputs into a folder, and makes the request.
        leads: Has a candidate serve that is faster than eager, until tuning has ended.
        is_ready: Whether enough is known of the calls.
        decided: Takes over what came of it.
        left: Leaves the graph to who serves it, and why.
        isolated: Names of candidates that may be silent for `timeout_s` alone.
        timeout_s: Seconds.
    """

    owner: "weakref.ref[Any]"
    followed: Followed
    budget: Budget
    prepare: Callable[[Any, Path], dict[str, Any]]
    leads: Callable[[Any, str], None]
    is_ready: Callable[[Any], bool]
    decided: Callable[[Any, Outcome], None]
    left: Callable[[Any, str], None]
    isolated: Collection[str]
    timeout_s: float

    def failed(self, reason: str) -> None:
        """Leaves the graph to who serves it, if it is still there."""
        owner = self.owner()
        if owner is not None:
            self.left(owner, reason)


class Listener:
    """What the other process said of a task before it answered, or was lost.

    Args:
        task: The task.
    """

    def __init__(self, task: Task):
        self._task = task
        self._before_s = self._spent_s = task.budget.spent_s
        self.candidate = ""  # that is under way
        self.excluded: dict[str, CandidateReport] = {}

    def __call__(self, said: dict[str, Any]) -> float | None:
        """Notes a line; returns how many seconds may pass until the next one."""
        owner = self._task.owner()
        if owner is None:
            raise NotWanted
        self._spent_s = said["spent_s"]
        if "leads" in said:
            self._task.leads(owner, said["leads"])
            return None
        if "ended" in said:
            row = CandidateReport.from_dict(said["ended"])
            self.candidate = ""
            if row.reason:
                self.excluded[row.name] = row
            return None
        self.candidate, number, of = said["begins"]
        self._task.followed.change(
            candidate=self.candidate, number=number, of=of, spent_s=self._spent_s
        )
        return self._task.timeout_s if self.candidate in self._task.isolated else None

    def count(self, spent_s: float | None = None) -> None:
        """Takes from the budget what was spent."""
        spent_s = self._spent_s if spent_s is None else spent_s
        self._task.budget.spend(spent_s - self._before_s)
        self._task.followed.change(spent_s=self._task.budget.spent_s)

    def blame(self, lost: Exception, suspect: str) -> str:
        """Why the candidate that was under way is tried no more; empty: it is not to blame.

        Args:
            lost: How the process was lost.
            suspect: Who was under way when it was lost the time before.
        """
        if not self.candidate or not isinstance(lost, Lost):
            return ""
        if lost.status is None:
            return f"did not finish within {self._task.timeout_s:g} s in a process of its own"
        if -lost.status in _FROM_OUTSIDE:  # perhaps because memory did not suffice
            twice = self.candidate == suspect
            return "its process was killed twice" if twice else ""
        if lost.status < 0:
            name = signal.Signals(-lost.status).name
            return f"crashed with {name} in a process of its own"
        return f"ended with exit status {lost.status} in a process of its own"


def read_outcome(answered: dict[str, Any]) -> Outcome:
    """Returns the outcome in the answer to a task."""
    rows = tuple(map(CandidateReport.from_dict, answered["rows"]))
    disturbed = bool(answered.get("disturbed", False))
    return Outcome(answered["winner"], rows, answered["short_of_s"], answered["seconds"], disturbed)
