"""Calls and other processes take turns: who works beside calls is stopped while they run.

A lower priority does not do. It decides about shares of time, not about places: a thread that wakes
up in the middle of a call is put where it ran before, beside another thread of that call, although
the other processor has nothing to run but a nice process. Calls of ResNet-18 in eager took 1.3
times as long while another process with a niceness of 10 tuned
(docs/decisions/background-processes.md).

Where calls leave no time at all it is not stopped: a loop without pauses is not waiting for a
request, gains by what is being compiled, and would not get it for a long time.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

import torch

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.workers.contention import processors
from dynamo_backends.workers.stopped_time import StoppedTime

_KEPT = 0.9  # of what is known of earlier calls, at each call
_LEAST_PAUSES = 0.05  # of the time; with less, nobody is stopped
_SHORT_S = 5e-4  # two signals are a part of a shorter call
_LONGEST_S = 2.0  # of a stop: the process may hold a lock that the call waits for


class ProcessPauser:
    """Stops helper processes while compiled calls of this process run.

    Args:
        send: Sends a signal to a group of processes.
        clock: Tells seconds.
    """

    def __init__(
        self,
        send: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._send = send or getattr(os, "killpg", None)
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Forgets all processes and calls, which are the parent's, in a forked child."""
        self._others: dict[int, StoppedTime] = {}
        self._stopped: dict[int, StoppedTime] = {}  # those of them that are stopped now
        self._lock = fork_safe_lock()
        self._processors = processors()
        self._callers: set[int] = set()
        self._over = threading.Event()  # set while no call is under way
        self._over.set()
        self._changed_at = self._stopped_at = self._clock()  # callers came, or the last one left
        self._busy = self._idle = 0.0  # seconds, of the latest calls and pauses

    @property
    def are_taken(self) -> bool:
        """Returns whether there is anybody to be stopped."""
        return bool(self._others)

    @property
    def any_call(self) -> bool:
        """Returns whether a call is under way."""
        return bool(self._callers)

    def is_in_call(self, caller: int) -> bool:
        """Returns whether one is under way in a thread."""
        return caller in self._callers

    def wait(self, timeout: float) -> None:
        """Waits for the end of all calls.

        Args:
            timeout: Seconds, at most.
        """
        self._over.wait(timeout)

    @property
    def leave_time(self) -> bool:
        """Returns whether there are pauses between calls, for work that is none of theirs."""
        return self._idle > _LEAST_PAUSES * (self._idle + self._busy)

    @property
    def come_first(self) -> bool:
        """Returns whether a call is under way, whose end is worth waiting for."""
        return self.any_call and self.leave_time

    def add(self, group: int, stopped: StoppedTime) -> None:
        """Calls go before a group of processes from now on, which has something to do.

        Args:
            group: The process that leads it.
            stopped: Gets the seconds for which it is stopped.
        """
        with self._lock:
            if self._send is not None:
                self._processors = processors()
                self._others[group] = stopped

    def discard(self, group: int) -> None:
        """The group has nothing to do any more, or is about to end; it goes on if it is stopped."""
        with self._lock:
            self._others.pop(group, None)
            self._resume(group)

    def release(self, group: int) -> None:
        """Lets a group go on that has been stopped for long, though the call is not over."""
        with self._lock:
            if self._clock() - self._stopped_at > _LONGEST_S:
                self._resume(group)

    def _resume(self, group: int) -> None:
        stopped = self._stopped.pop(group, None)
        if stopped is not None:
            stopped.add(self._clock() - self._stopped_at)
            self._signal("SIGCONT", [group])

    def stopped_s(self, group: int) -> float:
        """Seconds for which a group has been stopped so far."""
        with self._lock:
            stopped = self._others.get(group)
            now = self._clock() - self._stopped_at if group in self._stopped else 0.0
            return now + (stopped.seconds if stopped is not None else 0.0)

    def begins(self, caller: int) -> None:
        """Notes that a call begins, and stops the processes.

        Args:
            caller: The thread.
        """
        with self._lock:
            now = self._clock()
            if not self._callers:
                self._idle = _KEPT * self._idle + now - self._changed_at
                self._changed_at = now
            self._callers.add(caller)
            self._over.clear()
            if not self._stopped and self._is_needed:
                self._stopped, self._stopped_at = self._others.copy(), now
                self._signal("SIGSTOP", self._stopped)

    def ends(self, caller: int) -> None:
        """The call of a thread ends."""
        with self._lock:
            if caller not in self._callers:
                return
            self._callers.remove(caller)
            if self._callers:
                return
            now = self._clock()
            self._busy = _KEPT * self._busy + now - self._changed_at
            self._changed_at = now
            for stopped in self._stopped.values():
                stopped.add(now - self._stopped_at)
            self._signal("SIGCONT", self._stopped)
            self._stopped = {}
            self._over.set()

    @property
    def _is_needed(self) -> bool:
        """Returns whether calls lack a processor, leave pauses, and are worth two signals."""
        threads = torch.get_num_threads() * (len(self._callers) + 1)  # as many for the others
        is_full = threads > self._processors
        return is_full and self.leave_time and self._busy * (1 - _KEPT) > _SHORT_S

    def _signal(self, name: str, groups: Iterable[int]) -> None:
        for group in groups:
            with contextlib.suppress(OSError):  # it has just ended
                assert self._send is not None
                self._send(group, getattr(signal, name))


turns = ProcessPauser()
"""Of this process."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=turns.forget)
