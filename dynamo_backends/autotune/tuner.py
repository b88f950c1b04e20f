"""Has graphs tuned in another process: one after the other, and again where the process was lost.

A thread waits for the other process. What is Python and takes time in this one (writing a graph,
loading a winner) is done by the thread of `pipeline.background`, which lets calls go first.
"""

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from dynamo_backends.autotune.listening import GaveUp, Listener, NotWanted, Task, read_outcome
from dynamo_backends.autotune.session import Outcome
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import CandidateReport, plain
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.compiler_process import NICE
from dynamo_backends.runtime.cache import cache_folder
from dynamo_backends.runtime.process_folder import process_folder
from dynamo_backends.tuning.answering import AnsweringProcess, Lost
from dynamo_backends.tuning.queue_thread import Helper, QueueThread

log = logging.getLogger("dynamo_backends")

SPARE = 5
"""So often the process is started again for a graph where no candidate is to blame."""

_START_S = 600.0  # for the imports, on a busy machine
_LOOK_S = 0.2


class _Process(AnsweringProcess):
    command: ClassVar[tuple[str, ...]] = ("-m", "dynamo_backends.autotune.tuner_process")
    niceness: ClassVar[int] = NICE


class Tuner(QueueThread[Task]):
    """The thread, the other process, and what waits for them.

    Linux ends the other process with the thread, which starts it.
    """

    name = "dynamo_backends tuner"
    last_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self._process = _Process()

    @property
    def helper(self) -> Helper:
        """See `QueueThread.helper`."""
        return self._process

    def disown(self) -> None:
        """In a forked child: leaves all to the parent."""
        self._process.disown()

    def do(self, item: Task) -> None:
        """See `QueueThread.do`: has a graph tuned."""
        try:
            with contextlib.suppress(NotWanted):
                self._tune(item)
        except Exception as error:
            log.debug("tuning beside the calls failed", exc_info=True)
            text = str(error) if isinstance(error, GaveUp) else brief_error(error)
            item.failed(text)

    def _tune(self, task: Task) -> None:
        request: dict[str, Any] = {}
        while not self._is_ready(task):
            self._look(task, threading.Event())
        with _folder() as folder:
            self._beside(task, lambda owner: request.update(task.prepare(owner, folder)))
            task.followed.change(state="tuning", budget_s=task.budget.total_s)
            outcome = self._asked(task, {**request, "folder": str(folder)})
        self._beside(task, lambda owner: task.decided(owner, outcome))

    def _is_ready(self, task: Task) -> bool:
        owner = task.owner()
        if owner is None:
            raise NotWanted
        return task.is_ready(owner)

    def _asked(self, task: Task, request: dict[str, Any]) -> Outcome:
        """Returns what came of a task, however often the process is lost on the way."""
        known = {row["name"]: CandidateReport.from_dict(row) for row in request["known"]}
        suspect, losses = "", 0
        while True:
            if task.owner() is None or self.is_stopping:
                raise NotWanted
            heard = Listener(task)
            budget = task.budget
            more = {"spent_s": budget.spent_s, "owes": budget.owes}
            try:
                if not self._process.running:
                    self._process.ask({}, _START_S)
                with self._ended_without(task.owner()):
                    rows = plain(list(known.values()))
                    answered = self._process.ask({**request, **more, "known": rows}, None, heard)
                break
            except (Lost, OSError) as lost:
                if self.is_stopping:
                    raise NotWanted from lost
                heard.count()
                known |= heard.excluded
                reason = heard.blame(lost, suspect)
                if reason:
                    known[heard.candidate] = CandidateReport(heard.candidate, reason)
                    continue
                suspect, losses = heard.candidate, losses + 1
                log.info("autotune: the process that tunes was lost: %s", lost)
                if losses > SPARE:
                    text = f"the process that tunes was lost {losses} times, at last: {lost}"
                    raise GaveUp(text) from lost
        if "problem" in answered:
            heard.count()
            raise GaveUp(f"tuning failed: {answered['problem']}")
        heard.count(answered["spent_s"])
        outcome = read_outcome(answered)
        if outcome.is_tried:
            task.budget.finished()
        return outcome

    @contextlib.contextmanager
    def _ended_without(self, owner: Any) -> Iterator[None]:
        """Ends the process when the graph is dropped, even if it is silent."""
        if owner is None:
            raise NotWanted
        gone = weakref.ref(owner, lambda _: self._process.end())
        del owner
        yield
        del gone

    def _beside(self, task: Task, job: Callable[[Any], None]) -> None:
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

        while not background.submit(over, run, owner=task.owner()):  # it has too much to do
            self._look(task, over)
        while not over.is_set():
            self._look(task, over)
        if raised:
            raise raised[0]

    def _look(self, task: Task, over: threading.Event) -> None:
        if not over.wait(_LOOK_S) and (self.is_stopping or task.owner() is None):
            raise NotWanted


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for one graph, beside the decisions.

    Raises:
        GaveUp: There is no place for it.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(process_folder(cache_folder() / "tuning"))
        except OSError as error:
            raise GaveUp(f"there is no place for a copy of the graph: {error}") from error
        yield folder


_tuner = Tuner()


def add(task: Task) -> None:
    """Has a graph tuned, after those that wait already."""
    _tuner.put(task)


def _after_fork() -> None:
    global _tuner
    _tuner.disown()
    _tuner = Tuner()


def _stop() -> None:
    _tuner.stop()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
