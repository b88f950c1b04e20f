"""A process that answers requests, and is started again when it is lost."""

import contextlib
import ctypes
import errno
import json
import logging
import os
import platform
import queue
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any, ClassVar, Self

from dynamo_backends.tuning.children import environment, kill
from dynamo_backends.tuning.stopped_time import (
    StoppedTime,
    argument,
    is_stopped_by_parent,
    shareable,
)
from dynamo_backends.tuning.turns import turns

log = logging.getLogger("dynamo_backends")

_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of sched_setattr and sched_getattr, which the C library has no functions for."""

_SLICE_NS = 100_000_000  # the longest
_KEEP_POLICY = 0x08
_ATTRIBUTES = struct.Struct("IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, ...


# A niceness decides about shares of time, not about when a thread that wakes up is run. Linux lets
# a nice process that runs finish its slice first, milliseconds in which each operator of a call may
# be waiting. Whoever has the longer slice is interrupted at once, though: since Linux 6.12 a
# process can be given the longest one (`sched_attr.sched_runtime` in `man 2 sched_setattr`).
# SCHED_IDLE would do as well, but such a process gets nothing where calls never pause, and may not
# leave that class.
def give_way(pid: int, niceness: int) -> None:
    """Lowers the priority of a process that was just started; threads that it starts inherit it.

    Args:
        pid: Of the process.
        niceness: Added to this process's.
    """
    if not hasattr(os, "setpriority"):  # Windows
        return
    with contextlib.suppress(ProcessLookupError):
        lower = min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, 19)
        os.setpriority(os.PRIO_PROCESS, pid, lower)
        if sys.platform == "linux":
            _take_long_slices(pid, lower)


def slice_ns(pid: int) -> int:
    """The length of a process's slices in nanoseconds; 0: the system chooses, or does not tell."""
    attributes = bytearray(_ATTRIBUTES.size)
    if _call(1, pid, attributes, _ATTRIBUTES.size):
        return 0
    return int(_ATTRIBUTES.unpack(attributes)[5])


def _take_long_slices(pid: int, niceness: int) -> None:
    wanted = (_ATTRIBUTES.size, 0, _KEEP_POLICY, niceness, 0, _SLICE_NS, 0, 0)
    failed = _call(0, pid, bytearray(_ATTRIBUTES.pack(*wanted)))
    if failed:  # the niceness stays
        log.debug("no longer slices for process %d: %s", pid, errno.errorcode.get(failed, failed))


def _call(which: int, pid: int, attributes: bytearray, *size: int) -> int:
    """Calls sched_setattr (0) or sched_getattr (1); returns the error's number, 0 for none."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    failed = libc.syscall(numbers[which], pid, buffer, *size, 0)
    return ctypes.get_errno() if failed else 0


_LEAST_WAIT_S = 0.01

Hear = Callable[[dict[str, Any]], float | None]
"""Gets what the process says before its answer; returns the seconds that it may now be silent."""


class Lost(Exception):
    """The process crashed or took too long; the message says which.

    Attributes:
        status: With which it ended; None: it took too long.
        last_line: What it wrote last to standard error, if that is kept.
    """

    def __init__(self, text: str, status: int | None = None, last_line: str = ""):
        super().__init__(text)
        self.status = status
        self.last_line = last_line


class AnsweringProcess:
    """A process that answers requests: JSON, one per line, on its standard input and output.

    Attributes:
        command: What Python runs there.
        niceness: By how much the priority of the process is lower than that of this one. If it is,
            calls and the process take turns while it has a request (see `turns`).
        keeps_errors: Whether `Lost.last_line` is known: for processes that do not live long.

    Examples:
        >>> with MeasuringProcess() as process:
        ...     process.ask({"do": "open", ...}, 60)
        {'seconds': 0.001}
    """

    command: ClassVar[tuple[str, ...]]
    niceness: ClassVar[int] = 0
    keeps_errors: ClassVar[bool] = False

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopped: StoppedTime | None = None  # by calls that go first
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """The process starts with the first request."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process."""
        self.end()

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._child is not None

    def ask(
        self, request: dict[str, Any], limit_s: float | None, hear: Hear | None = None
    ) -> dict[str, Any]:
        """Returns an answer.

        Args:
            request: What the command takes.
            limit_s: Seconds after which the process is ended, those not counted in which it is
                stopped; None: it may take for ever.
            hear: Gets each line with "said" in it, of which there may be some before the answer.

        Raises:
            Lost: There is none. The next request starts a new process.
        """
        child = self._child or self._start()
        assert child.stdin is not None
        if self._stopped is not None:
            turns.add(child.pid, self._stopped)
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
            while line := self._line(child.pid, limit_s):
                answer: dict[str, Any] = json.loads(line)
                if hear is None or "said" not in answer:
                    return answer
                limit_s = hear(answer["said"])
        except queue.Empty:
            self.end()
            raise Lost(f"it took more than {limit_s:g} s") from None
        except (OSError, ValueError):  # its pipe is broken, or closed by `end` in another thread
            pass
        except BaseException:  # Ctrl-C; the answer would be taken for that of the next request
            self.end()
            raise
        finally:
            turns.discard(child.pid)
        status = child.wait()
        last_line = self._last_line()
        self.end()
        raise Lost(f"its process ended with status {status}", status, last_line)

    def _last_line(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _line(self, pid: int, limit_s: float | None) -> str:
        """Returns what the process writes next; empty at its end."""
        while True:
            before = turns.stopped_s(pid)
            try:
                return self._answers.get(timeout=limit_s)
            except queue.Empty:
                limit_s = turns.stopped_s(pid) - before
                if limit_s < _LEAST_WAIT_S:
                    raise

    def _start(self) -> "subprocess.Popen[str]":
        if self.niceness and os.name == "posix":
            with shareable() as (self._stopped, descriptor):
                child = self._launched(descriptor)
            give_way(child.pid, self.niceness)  # the imports, too, take seconds and all processors
        else:
            child = self._launched()
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read() -> None:
            assert child.stdout is not None
            with contextlib.suppress(ValueError):  # it was closed
                for line in child.stdout:
                    answers.put(line)
            answers.put("")

        threading.Thread(target=read, daemon=True).start()
        self._child, self._answers = child, answers
        return child

    def _launched(self, *descriptors: int) -> "subprocess.Popen[str]":
        """Returns the process, which follows the number behind a descriptor if one is given."""
        if self.keeps_errors:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        return subprocess.Popen(
            [sys.executable, *self.command, *map(argument, descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors or subprocess.DEVNULL,
            text=True,
            env=environment(),
            # Ctrl-C is for this process alone. In a session of its own, Linux would not count its
            # niceness against this process (see autogroups in `man 7 sched`). Who is stopped for
            # the sake of calls is so with all that it has started.
            process_group=None if is_stopped_by_parent() else 0,
            pass_fds=descriptors,
        )

    def end(self) -> None:
        """Ends the process; who waits for an answer in another thread has lost it."""
        child, self._child = self._child, None
        if child is None:
            return
        turns.discard(child.pid)
        kill(child)
        for pipe in (child.stdin, child.stdout, self._errors):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
        self._errors = None

    def disown(self) -> None:
        """In a forked child: leaves the process to the parent, and lets go of its pipes."""
        child, self._child = self._child, None
        if child is None:
            return
        with open(os.devnull, "r+b") as nothing:
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                os.dup2(nothing.fileno(), pipe.fileno(), inheritable=False)
        child.returncode = 0  # nobody waits for it here
