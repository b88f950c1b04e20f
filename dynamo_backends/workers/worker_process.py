"""A process that answers requests: JSON, one per line, on its standard input and output.

Where something may crash, hang, or take too much memory or the interpreter lock, another process
does it: compiling and tuning beside calls, candidates of autotune, schedules of TVM, the cells of a
benchmark and the checks of conformance. What became of such a process is a `ProcessLostError`,
which is raised for the request that it was at; the next request starts another one.
"""

import contextlib
import ctypes
import errno
import json
import logging
import os
import platform
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from dynamo_backends.workers.memory import tree_bytes
from dynamo_backends.workers.stopped_time import (
    StoppedTime,
    follow_stopped_time,
    is_stopped_by_parent,
    shared_stopped_time,
    stopped_time_argument,
)
from dynamo_backends.workers.turns import turns

log = logging.getLogger("dynamo_backends")

_LEAST_WAIT_S = 0.01
_LOOK_S = 0.5  # between looks at how much memory it has: they take time from what it does

Hear = Callable[[Any], float | None]
"""Gets what the process says before its answer; returns the seconds that it may now be silent."""

Say = Callable[[Any], None]
"""Tells the parent something before the answer; in types that JSON has."""


class ProcessLostError(Exception):
    """The worker process crashed, took too long or used too much memory.

    Attributes:
        status: With which it ended; None: it was ended, for a limit.
        limit: Which limit it passed.
        last_line: What it printed last, if that is kept.
    """

    def __init__(
        self,
        text: str,
        status: int | None = None,
        last_line: str = "",
        limit: Literal["", "time", "memory"] = "",
    ):
        super().__init__(text)
        self.status = status
        self.limit = limit
        self.last_line = last_line


class WorkerProcess:
    """A process that runs `serve`; it starts with the first request.

    Args:
        command: What Python runs there.
        niceness: By how much the priority of the process is lower than that of this one. If it is,
            calls and the process take turns while it has a request (see `turns`).
        output: Where it prints: a file, to whose end that is written and of which
            `ProcessLostError` knows the last line, or the number of a descriptor.
        variables: Variables of its environment, besides those of this process.
        memory_bytes: It is ended when it has more, together with those that it started.

    Examples:
        >>> with WorkerProcess(("-m", "dynamo_backends.tvm.worker")) as process:
        ...     process.ask({"do": "open", ...}, 60)
        {'seconds': 0.001}
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        niceness: int = 0,
        output: Path | int = subprocess.DEVNULL,
        variables: Mapping[str, str] | None = None,
        memory_bytes: float | None = None,
    ) -> None:
        self._command = command
        self._niceness = niceness
        self._output = output
        self._variables = variables or {}
        self._memory_bytes = memory_bytes
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopped: StoppedTime | None = None  # by calls that go first

    def __enter__(self) -> Self:
        """The process starts with the first request."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process and closes its pipes."""
        self.end()

    @property
    def running(self) -> bool:
        """Returns whether there is a process."""
        return self._child is not None

    def ask(
        self, request: dict[str, Any], limit_s: float | None, hear: Hear | None = None
    ) -> dict[str, Any]:
        """Sends a request and returns its answer.

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
        except (OSError, ValueError):  # its pipe is broken, or closed by `end` in another thread
            pass
        except BaseException:  # a limit; Ctrl-C: the answer would be taken for that of the next
            self.end()
            raise
        finally:
            turns.discard(child.pid)
        raise self._ended(child)

    def finish(self, limit_s: float) -> None:
        """Lets the process end by itself.

        Args:
            limit_s: Seconds after which it is ended.

        Raises:
            Lost: It does not end, or with another status than 0.
        """
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        try:
            with contextlib.suppress(OSError):
                child.stdin.write("null\n")
                child.stdin.flush()
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ProcessLostError(f"it took more than {limit_s:g} s", limit="time") from None
        else:
            if child.returncode:
                raise self._ended(child)
        finally:
            self.end()

    def _ended(self, child: "subprocess.Popen[str]") -> ProcessLostError:
        status = child.wait()
        self.end()
        last_line = ""
        if isinstance(self._output, Path):
            text = self._output.read_text(encoding="utf-8", errors="replace")
            last_line = (text.strip().splitlines() or [""])[-1]
        return ProcessLostError(f"its process ended with status {status}", status, last_line)

    def _line(self, pid: int, limit_s: float | None) -> str:
        """Returns what the process writes next; empty at its end.

        Raises:
            Lost: It has passed a limit.
        """
        start, stopped_s = time.monotonic(), turns.stopped_s(pid)
        while True:
            left_s = None
            if limit_s is not None:
                passed_s = time.monotonic() - start - (turns.stopped_s(pid) - stopped_s)
                left_s = max(limit_s - passed_s, 0.0)
            wait_s = left_s
            if self._memory_bytes is not None or self._stopped is not None:
                wait_s = _LOOK_S if left_s is None else min(left_s, _LOOK_S)
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=wait_s)
            turns.release(pid)
            if left_s is not None and left_s < _LEAST_WAIT_S:
                raise ProcessLostError(f"it took more than {limit_s:g} s", limit="time")
            if self._memory_bytes is not None and (used := tree_bytes(pid)) > self._memory_bytes:
                allowed = f"of {self._memory_bytes / 1e9:g} allowed"
                raise ProcessLostError(f"{used / 1e9:.1f} GB, {allowed}", limit="memory")

    def _start(self) -> "subprocess.Popen[str]":
        if self._niceness and os.name == "posix":
            with shared_stopped_time() as (self._stopped, descriptor):
                child = self._launched(descriptor)
            lower_priority(
                child.pid, self._niceness
            )  # the imports, too, take seconds and all processors
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
        with contextlib.ExitStack() as opened:
            output: Any = self._output
            if isinstance(output, Path):
                output = opened.enter_context(output.open("ab"))
            return subprocess.Popen(
                [sys.executable, *self._command, *map(stopped_time_argument, descriptors)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**child_environment(), **self._variables},
                # Ctrl-C is for this process alone. In a session of its own, Linux would not count
                # its niceness against this process (see autogroups in `man 7 sched`). Who is
                # stopped for the sake of calls is so with all that it has started.
                process_group=None if is_stopped_by_parent() else 0,
                pass_fds=descriptors,
            )

    def end(self) -> None:
        """Ends the process; who waits for an answer in another thread has lost it."""
        child, self._child = self._child, None
        if child is None:
            return
        turns.discard(child.pid)
        try:  # and those that it started, if it leads a group
            os.killpg(child.pid, signal.SIGKILL)
        except (AttributeError, OSError):
            child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()

    def disown(self) -> None:
        """Leaves the process to the parent, in a forked child, and closes its pipes."""
        child, self._child = self._child, None
        if child is None:
            return
        with open(os.devnull, "r+b") as nothing:
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                os.dup2(nothing.fileno(), pipe.fileno(), inheritable=False)
        child.returncode = 0  # nobody waits for it here


def child_environment() -> dict[str, str]:
    """Returns environment variables for a child process with the same `sys.path`."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}


# In the other process.


def serve(
    answer: Callable[[dict[str, Any], Say], dict[str, Any]], ends_with_thread: bool = False
) -> None:
    """Answers one request after the other, as long as the parent is there and wants more.

    Args:
        answer: Makes the answer to a request.
        ends_with_thread: Whether Linux ends this process when the thread that started it ends,
            however it does. Reading until there is no more does not do: another process may hold
            the other end of a pipe, and compilers in C++ keep Python's threads from looking.
    """
    if ends_with_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    follow_stopped_time(sys.argv)
    # What libraries print must not come between the answers.
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(line: dict[str, Any]) -> None:
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    for request in _requests():
        write(answer(request, lambda said: write({"said": said})))


_PR_SET_PDEATHSIG = 1  # `man 2 prctl`


def _requests() -> Iterator[dict[str, Any]]:
    """Requests up to null; where there are no more, the parent is gone, and so is this process."""
    given: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            request = json.loads(line)
            given.put(request)
            if request is None:
                return
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return iter(given.get, None)


# Priorities.

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
def lower_priority(pid: int, niceness: int) -> None:
    """Lowers the priority of a process that was just started; threads that it starts inherit it.

    Args:
        pid: Pid of the process.
        niceness: Added to this process's.
    """
    if not hasattr(os, "setpriority"):  # Windows
        return
    with contextlib.suppress(ProcessLookupError):
        lower = min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, 19)
        os.setpriority(os.PRIO_PROCESS, pid, lower)
        if sys.platform == "linux":
            wanted = (_ATTRIBUTES.size, 0, _KEEP_POLICY, lower, 0, _SLICE_NS, 0, 0)
            failed = _call(0, pid, bytearray(_ATTRIBUTES.pack(*wanted)))
            if failed:  # the niceness stays
                code = errno.errorcode.get(failed, failed)
                log.debug("could not restore the scheduling of process %d: %s", pid, code)


def slice_ns(pid: int) -> int:
    """Returns a process's scheduler time slice in nanoseconds; 0 if unknown."""
    attributes = bytearray(_ATTRIBUTES.size)
    if _call(1, pid, attributes, _ATTRIBUTES.size):
        return 0
    return int(_ATTRIBUTES.unpack(attributes)[5])


def _call(which: int, pid: int, attributes: bytearray, *size: int) -> int:
    """Calls sched_setattr (0) or sched_getattr (1); returns the error's number, 0 for none."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    failed = libc.syscall(numbers[which], pid, buffer, *size, 0)
    return ctypes.get_errno() if failed else 0
