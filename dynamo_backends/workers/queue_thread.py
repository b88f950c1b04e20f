"""A thread that does one thing after the other, and ends its helper when there is nothing to do."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar, Generic, Protocol, TypeVar

Item = TypeVar("Item")


class Stopped(BaseException):
    """Ends the thread: no handler of `Exception` is to see it."""


class Helper(Protocol):
    """A process that works for the thread."""

    @property
    def running(self) -> bool:
        """Returns whether there is one."""

    def end(self) -> None:
        """Ends it; it is started again when it is needed."""


class QueueThread(ABC, Generic[Item]):
    """Does what it is given, one after the other, in a thread that begins with the first of it.

    Attributes:
        name: Name of the thread.
        idle_s: Seconds without anything to do after which the helper is ended.
        last_s: Seconds that `stop` waits for what is under way.
        changed: Guards what is waiting, and is notified when that changes.
        waiting: What is to be done.
        is_stopping: Whether what is under way is to end.
    """

    name: ClassVar[str]
    idle_s: ClassVar[float] = 60.0
    last_s: ClassVar[float]

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Item] = deque()
        self.is_stopping = False
        self._thread: threading.Thread | None = None

    @property
    @abstractmethod
    def helper(self) -> Helper:
        """The process that works for the thread."""

    @abstractmethod
    def do(self, item: Item) -> None:
        """Does one thing; may raise `Stopped`, and nothing else."""

    def put(self, item: Item) -> None:
        """Has something done after what waits already."""
        with self.changed:
            self.waiting.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._thread.start()
            self.changed.notify_all()

    @property
    def is_here(self) -> bool:
        """Returns whether the caller runs in the thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Ends what is under way, and the helper."""
        with self.changed:
            self.is_stopping = True
            self.waiting.clear()
            self.changed.notify_all()
        self.helper.end()
        if self._thread is not None:
            self._thread.join(self.last_s)

    def _work(self) -> None:
        try:
            while (item := self._next()) is not None:
                self.do(item)
                del item
        except Stopped:
            return

    def _next(self) -> Item | None:
        """Returns what is to be done next, once there is something; None at the end."""
        with self.changed:
            while not self.waiting and not self.is_stopping:
                if not self.changed.wait(self.idle_s if self.helper.running else None):
                    self.helper.end()
            return None if self.is_stopping else self.waiting.popleft()
