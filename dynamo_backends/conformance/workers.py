"""Processes that work through a list; one that breaks down or hangs costs what it was at."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from dynamo_backends.tuning.children import end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

TIMEOUT = "timeout"
"""In place of an exit code: the process was ended, for it took longer than it may."""

_CONTEXT = multiprocessing.get_context("spawn")
_START_S = 600.0  # for Python and its imports
_END_S = 20.0
_LOOK_S = 0.5
_BEGUN = "begun"


class Worker:
    """A process that applies a function to what it is sent.

    Args:
        function: Can be pickled, as items and results can.
        log: Where what it prints is appended; None: it prints where this process does.
    """

    def __init__(self, function: Callable[[Any], Any], log: Path | None = None):
        self.connection, theirs = _CONTEXT.Pipe()
        arguments = (function, theirs, log)
        self.process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.done = 0
        """Items given, the current one included."""
        self.item: Any = None
        self._until = 0.0

    def give(self, item: Any, limit_s: float | None = None) -> None:
        """Sends an item, on which it may work for so long once it has begun."""
        self.item, self._limit_s = item, limit_s
        self.done += 1
        self._until = time.monotonic() + _START_S
        try:
            self.connection.send(item)
        except (BrokenPipeError, ConnectionResetError):
            return  # `receive` says how it ended

    def receive(self) -> tuple[bool, Any]:
        """What is ready in the connection: whether it is a result, and that.

        Raises:
            EOFError: The process has ended.
        """
        try:
            found: tuple[bool, Any] = self.connection.recv()
        except ConnectionResetError as error:
            raise EOFError from error
        if not found[0]:
            limit = float("inf") if self._limit_s is None else self._limit_s
            self._until = time.monotonic() + limit
        return found

    @property
    def is_late(self) -> bool:
        """Whether it has worked longer than it may."""
        return time.monotonic() > self._until

    def end(self) -> int:
        """Lets the process end, and returns its exit code."""
        self.connection.close()
        self.process.join(_END_S)
        if self.process.is_alive():  # threads of some library go on
            self._kill()
            self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def kill(self) -> None:
        """Ends the process and those that it started."""
        self._kill()
        self.end()

    def _kill(self) -> None:
        pid = self.process.pid
        assert pid is not None
        try:
            os.killpg(pid, signal.SIGKILL)
        except (AttributeError, OSError):  # it has no group of its own yet, or has ended
            self.process.kill()

    def result(self, broke_down: Callable[[Any, int | str], Any]) -> Any:
        """Waits for the result of the item that it was given; see `each`."""
        while True:
            if self.connection.poll(_LOOK_S):
                try:
                    done, value = self.receive()
                except EOFError:
                    return broke_down(self.item, self.end())
                if done:
                    return value
            elif self.is_late:
                self.kill()
                return broke_down(self.item, TIMEOUT)


def _serve(function: Callable[[Any], Any], connection: Connection, log: Path | None) -> None:
    end_with_parent()
    if hasattr(os, "setsid"):
        os.setsid()
    if log is not None:
        _print_to(log)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        connection.send((False, _BEGUN))
        connection.send((True, function(item)))


def _print_to(log: Path) -> None:
    """Has this process, C++ in it included, write to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)


def each(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    broke_down: Callable[[Item, int | str], Result],
    processes: int = 2,
    lifetime: int = 150,
    limit_s: float | None = None,
    log: Path | None = None,
) -> Iterator[Result]:
    """A function's results, as they come.

    Args:
        function: Can be pickled, as items and results can.
        items: What it is applied to.
        broke_down: The result in place of one during which the process ended, and its exit code;
            or `TIMEOUT`.
        processes: So many at a time.
        lifetime: So many items, then a new process: what was compiled stays in memory.
        limit_s: So many seconds an item may take; a process's start does not count.
        log: Where what they print is appended.
    """
    left = iter(items)
    workers: dict[Connection, Worker] = {}

    def start(worker: Worker | None = None) -> None:
        for item in left:
            worker = worker or Worker(function, log)
            worker.give(item, limit_s)
            workers[worker.connection] = worker
            return
        if worker is not None:
            worker.end()

    try:
        for _ in range(processes):
            start()
        while workers:
            for result, worker in _results(workers, broke_down):
                if worker is not None and worker.done >= lifetime:
                    worker.end()
                    worker = None
                start(worker)
                yield result
    finally:
        for worker in workers.values():
            worker.kill()


def _results(
    workers: dict[Connection, Worker], broke_down: Callable[[Any, int | str], Any]
) -> Iterator[tuple[Any, Worker | None]]:
    """Takes out workers that are done with an item: the result, and the worker if it lives."""
    for ready in wait(list(workers), _LOOK_S):
        worker = workers[ready]  # type: ignore[index]
        try:
            done, value = worker.receive()
        except EOFError:
            del workers[worker.connection]
            yield broke_down(worker.item, worker.end()), None
            continue
        if done:
            del workers[worker.connection]
            yield value, worker
    for worker in [w for w in workers.values() if w.is_late]:
        del workers[worker.connection]
        worker.kill()
        yield broke_down(worker.item, TIMEOUT), None
