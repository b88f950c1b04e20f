"""A thread for calls that may never return."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Task:
    """A call that somebody waits for.

    Args:
        call: What to do.

    Attributes:
        result: What it returned.
        error: What it raised.
    """

    def __init__(self, call: Callable[[], Any]):
        self._call = call
        self._done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Does it."""
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Returns whether it is done after so many seconds."""
        return self._done.wait(seconds)


class Worker:
    """One thread that does one call after the other.

    Attributes:
        is_busy: Whether it is at one.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self.is_busy = False
        threading.Thread(target=self._run, name="dynamo-backends mesh", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Task:
        """Has a call done when those before it are."""
        task = Task(call)
        self._tasks.put(task)
        return task

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            self.is_busy = True
            task.run()
            self.is_busy = False
