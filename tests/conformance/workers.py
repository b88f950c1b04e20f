"""Processes that work through a list; one that breaks down costs the item that it was at."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_CONTEXT = multiprocessing.get_context("spawn")


class _Worker:
    """A process that applies a function to what it is sent."""

    def __init__(self, function: Callable[[Any], Any]):
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.done = 0
        self.item: Any = None

    def give(self, item: Any) -> None:
        self.item = item
        self.done += 1
        self.connection.send(item)

    def end(self) -> int:
        """Lets the process end, and returns its exit code."""
        self.connection.close()
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        connection.send(function(item))


def each(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    broke_down: Callable[[Item, int], Result],
    processes: int = 2,
    lifetime: int = 150,
) -> Iterator[Result]:
    """A function's results, as they come.

    Args:
        function: Can be pickled, as items and results can.
        items: What it is applied to.
        broke_down: The result in place of one during which the process ended, and its exit code.
        processes: So many at a time.
        lifetime: So many items, then a new process: what was compiled stays in memory.
    """
    left = iter(items)
    workers: dict[Connection, _Worker] = {}

    def start(worker: _Worker | None = None) -> None:
        for item in left:
            worker = worker or _Worker(function)
            worker.give(item)
            workers[worker.connection] = worker
            return
        if worker is not None:
            worker.end()

    for _ in range(processes):
        start()
    while workers:
        for ready in wait(list(workers)):
            worker: _Worker | None = workers.pop(ready)  # type: ignore[call-overload]
            assert worker is not None
            try:
                result = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                result = broke_down(worker.item, worker.end())
                worker = None
            else:
                if worker.done >= lifetime:
                    worker.end()
                    worker = None
            start(worker)
            yield result
