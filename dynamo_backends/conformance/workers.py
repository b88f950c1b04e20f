"""Functions that run in other processes; one that breaks down or hangs costs what it was at."""

import base64
import pickle
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from dynamo_backends.workers.worker_process import ProcessLostError, Say, WorkerProcess, serve

Item = TypeVar("Item")
Result = TypeVar("Result")

TIMEOUT = "timeout"
"""In place of an exit code: the process was ended, for it took longer than it may."""

LIFETIME = 150
"""Number of items after which a new process is started: compiled code stays in memory."""

_START_S = 600.0  # for Python and its imports
_STANDARD_ERROR = 2


class Worker(WorkerProcess):
    """A process that applies a function to what it is sent.

    Args:
        function: Can be pickled, as items and results can.
        log: Where what it prints is appended; None: it prints where this process does.
        lifetime: Number of items after which a new process is started.
    """

    def __init__(
        self, function: Callable[[Any], Any], log: Path | None = None, lifetime: int = LIFETIME
    ):
        super().__init__(("-m", __name__), output=log or _STANDARD_ERROR)
        self._function = function
        self._lifetime = lifetime
        self._done = 0

    def result(
        self,
        item: Any,
        broke_down: Callable[[Any, int | str], Any],
        limit_s: float | None = None,
    ) -> Any:
        """Returns the function's result; see `map_in_processes`."""
        if self._done >= self._lifetime:
            self.end()
            self._done = 0
        self._done += 1
        request = {"call": _text((self._function, item))}
        try:
            return _read(self.ask(request, _START_S, lambda begun: limit_s)["result"])
        except ProcessLostError as lost:
            self._done = 0
            return broke_down(item, TIMEOUT if lost.status is None else lost.status)


def map_in_processes(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    broke_down: Callable[[Item, int | str], Result],
    processes: int = 2,
    lifetime: int = LIFETIME,
    limit_s: float | None = None,
    log: Path | None = None,
) -> Iterator[Result]:
    """Applies a function to items in worker processes; yields results as they finish.

    Args:
        function: Can be pickled, as items and results can.
        items: What it is applied to.
        broke_down: The result in place of one during which the process ended, and its exit code;
            or `TIMEOUT`.
        processes: Number of processes at a time.
        lifetime: Number of items after which a new process is started.
        limit_s: Seconds that an item may take, without the start of a process.
        log: Where what they print is appended.
    """
    workers = [Worker(function, log, lifetime) for _ in range(processes)]
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(item: Item) -> Result:
        worker = idle.get()
        try:
            result: Result = worker.result(item, broke_down, limit_s)
        finally:
            idle.put(worker)
        return result

    with ThreadPoolExecutor(processes) as pool:  # Linux ends a process with the thread it is of
        try:
            yield from (f.result() for f in as_completed([pool.submit(run, x) for x in items]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.end()


def _answer(request: dict[str, Any], say: Say) -> dict[str, Any]:
    function, item = _read(request["call"])
    say("begun")
    return {"result": _text(function(item))}


def _text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _read(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))  # of a process that this one started, or its parent


if __name__ == "__main__":
    serve(_answer, ends_with_thread=True)
