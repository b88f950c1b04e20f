"""Has graphs tuned in another process: one after the other, and again where the process was lost.

A thread waits for the other process. What is Python and takes time in this one (writing a graph,
loading a winner) is done by the thread of `pipeline.background`, which lets calls go first.
"""

import atexit
import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_backends.autotune.isolation import COMMAND, describe_lost_process
from dynamo_backends.autotune.session import SessionOutcome
from dynamo_backends.autotune.status import TrackedGraph
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import CandidateReport, to_json_types
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.compiler_process import NICE
from dynamo_backends.runtime.cache import cache_folder
from dynamo_backends.runtime.private_folder import temporary_process_folder
from dynamo_backends.workers.budget import Budget
from dynamo_backends.workers.queue_thread import Helper, QueueThread
from dynamo_backends.workers.worker_process import ProcessLostError, WorkerProcess

log = logging.getLogger("dynamo_backends")

MAX_RESTARTS = 5
"""Number of restarts of the process for a graph for which no candidate is to blame."""

_START_S = 600.0  # for the imports, on a busy machine
_LOOK_S = 0.2
_FROM_OUTSIDE = [getattr(signal, n, 0) for n in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")]


class TuningCancelledError(Exception):
    """Raised when the graph was dropped or the process ends: nobody needs the result."""


class TuningFailedError(Exception):
    """Raised when a graph cannot be tuned; the message says why."""


@dataclass
class TuningJob:
    """A graph queued for tuning in another process, with its callbacks.

    Attributes:
        owner: Who serves it; once that is gone nobody wants it to be tuned.
        followed: Its status.
        budget: Budget of all graphs with the same options.
        prepare: Writes the graph and its inputs into a folder, and makes the request.
        leads: Has a candidate serve that is faster than eager, until tuning has ended.
        is_ready: Whether enough is known of the calls.
        decided: Takes over what came of it.
        left: Leaves the graph to who serves it, and why.
        isolated: Names of candidates that may be silent for `timeout_s` alone.
        timeout_s: Seconds.
    """

    owner: "weakref.ref[Any]"
    followed: TrackedGraph
    budget: Budget
    prepare: Callable[[Any, Path], dict[str, Any]]
    leads: Callable[[Any, str], None]
    is_ready: Callable[[Any], bool]
    decided: Callable[[Any, SessionOutcome], None]
    left: Callable[[Any, str], None]
    isolated: Collection[str]
    timeout_s: float

    def report_failure(self, reason: str) -> None:
        """Tells the graph's owner, if it is alive, that tuning failed and why."""
        owner = self.owner()
        if owner is not None:
            self.left(owner, reason)


class TuningProgressListener:
    """Handles the tuning process's progress messages for one job.

    Args:
        task: The task.
    """

    def __init__(self, task: TuningJob):
        self._task = task
        self._before_s = self._spent_s = task.budget.spent_s
        self.candidate = ""  # that is under way
        self.excluded: dict[str, CandidateReport] = {}

    def __call__(self, said: dict[str, Any]) -> float | None:
        """Notes a line; returns how many seconds may pass until the next one."""
        owner = self._task.owner()
        if owner is None:
            raise TuningCancelledError
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
        self._task.followed.update_status(
            candidate=self.candidate, number=number, of=of, spent_s=self._spent_s
        )
        return self._task.timeout_s if self.candidate in self._task.isolated else None

    def charge_budget(self, spent_s: float | None = None) -> None:
        """Charges the seconds that the tuning process spent to the budget."""
        spent_s = self._spent_s if spent_s is None else spent_s
        self._task.budget.spend(spent_s - self._before_s)
        self._task.followed.update_status(spent_s=self._task.budget.spent_s)

    def exclusion_reason(self, lost: Exception, suspect: str) -> str:
        """Returns why the candidate under way is excluded after a crash; "" if not.

        Args:
            lost: How the process was lost.
            suspect: Who was under way when it was lost the time before.
        """
        if not self.candidate or not isinstance(lost, ProcessLostError):
            return ""
        if -(lost.status or 0) in _FROM_OUTSIDE:  # perhaps because memory did not suffice
            twice = self.candidate == suspect
            return "its process was killed twice" if twice else ""
        return describe_lost_process(lost, self._task.timeout_s)


def parse_outcome(answered: dict[str, Any]) -> SessionOutcome:
    """Converts the tuning process's JSON answer to an outcome."""
    rows = tuple(map(CandidateReport.from_dict, answered["rows"]))
    disturbed = bool(answered.get("disturbed", False))
    return SessionOutcome(
        answered["winner"], rows, answered["short_of_s"], answered["seconds"], disturbed
    )


class TuningThread(QueueThread[TuningJob]):
    """The thread that feeds queued graphs to one tuning process.

    Linux ends the other process with the thread, which starts it.
    """

    name = "dynamo_backends tuner"
    last_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self._process = WorkerProcess(COMMAND, niceness=NICE)

    @property
    def helper(self) -> Helper:
        """See `QueueThread.helper`."""
        return self._process

    def disown(self) -> None:
        """Forgets the tuning process, in a forked child: it belongs to the parent."""
        self._process.disown()

    def do(self, item: TuningJob) -> None:
        """Tunes one graph in the other process (see `QueueThread.do`)."""
        try:
            with contextlib.suppress(TuningCancelledError):
                self._tune(item)
        except Exception as error:
            log.debug("tuning in the background failed", exc_info=True)
            text = str(error) if isinstance(error, TuningFailedError) else brief_error(error)
            item.report_failure(text)

    def _tune(self, task: TuningJob) -> None:
        request: dict[str, Any] = {}
        while not self._is_ready(task):
            self._look(task, threading.Event())
        with _folder() as folder:
            self._in_background(task, lambda owner: request.update(task.prepare(owner, folder)))
            task.followed.update_status(state="tuning", budget_s=task.budget.total_s)
            outcome = self._asked(task, {**request, "folder": str(folder)})
        self._in_background(task, lambda owner: task.decided(owner, outcome))

    def _is_ready(self, task: TuningJob) -> bool:
        owner = task.owner()
        if owner is None:
            raise TuningCancelledError
        return task.is_ready(owner)

    def _asked(self, task: TuningJob, request: dict[str, Any]) -> SessionOutcome:
        """Returns what came of a task, however often the process is lost on the way."""
        known = {row["name"]: CandidateReport.from_dict(row) for row in request["known"]}
        suspect, losses = "", 0
        while True:
            if task.owner() is None or self.is_stopping:
                raise TuningCancelledError
            heard = TuningProgressListener(task)
            budget = task.budget
            more = {"spent_s": budget.spent_s, "owes": budget.owes}
            try:
                if not self._process.running:
                    self._process.ask({}, _START_S)
                with self._ended_without(task.owner()):
                    rows = to_json_types(list(known.values()))
                    answered = self._process.ask({**request, **more, "known": rows}, None, heard)
                break
            except (ProcessLostError, OSError) as lost:
                if self.is_stopping:
                    raise TuningCancelledError from lost
                heard.charge_budget()
                known |= heard.excluded
                reason = heard.exclusion_reason(lost, suspect)
                if reason:
                    known[heard.candidate] = CandidateReport(heard.candidate, reason)
                    continue
                suspect, losses = heard.candidate, losses + 1
                log.info("autotune: the tuning process was lost: %s", lost)
                if losses > MAX_RESTARTS:
                    text = f"the tuning process was lost {losses} times; the last time: {lost}"
                    raise TuningFailedError(text) from lost
        if "problem" in answered:
            heard.charge_budget()
            raise TuningFailedError(f"tuning failed: {answered['problem']}")
        heard.charge_budget(answered["spent_s"])
        outcome = parse_outcome(answered)
        if outcome.tried_any:
            task.budget.finished()
        return outcome

    @contextlib.contextmanager
    def _ended_without(self, owner: Any) -> Iterator[None]:
        """Ends the process when the graph is dropped, even if it is silent."""
        if owner is None:
            raise TuningCancelledError
        gone = weakref.ref(owner, lambda _: self._process.end())
        del owner
        yield
        del gone

    def _in_background(self, task: TuningJob, job: Callable[[Any], None]) -> None:
        """Has the thread that lets calls go first do something, and waits for it.

        Raises:
            Exception: What the job raised.
        """
        over = threading.Event()
        raised: list[Exception] = []

        def run(owner: Any) -> None:
            try:
                job(owner)
            except Exception as error:
                raised.append(error)
            finally:
                over.set()

        while not background.submit_compilation(
            over, run, owner=task.owner()
        ):  # it has too much to do
            self._look(task, over)
        while not over.is_set():
            self._look(task, over)
        if raised:
            raise raised[0]

    def _look(self, task: TuningJob, over: threading.Event) -> None:
        if not over.wait(_LOOK_S) and (self.is_stopping or task.owner() is None):
            raise TuningCancelledError


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Makes a temporary folder for one graph, beside the decisions.

    Raises:
        GaveUp: There is no place for it.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(temporary_process_folder(cache_folder() / "tuning"))
        except OSError as error:
            raise TuningFailedError(
                f"a copy of the graph cannot be written to the cache folder: {error}"
            ) from error
        yield folder


_thread = TuningThread()


def enqueue_job(task: TuningJob) -> None:
    """Queues a graph for background tuning."""
    _thread.put(task)


def _after_fork() -> None:
    global _thread
    _thread.disown()
    _thread = TuningThread()


def _stop() -> None:
    _thread.stop()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
