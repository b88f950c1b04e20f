"""Has another process run only where this one leaves a processor.

A niceness decides about shares of time, not about when a thread that wakes up is run. Linux lets a
nice process that runs finish its slice first, milliseconds in which each operator of a call may be
waiting. Whoever has the longer slice is interrupted at once, though: since Linux 6.12 a process can
be given the longest one (`sched_attr.sched_runtime` in `man 2 sched_setattr`).

SCHED_IDLE would do as well, but such a process gets nothing where calls never pause, and may not
leave that class again.
"""

import contextlib
import ctypes
import errno
import logging
import os
import platform
import struct
import sys

log = logging.getLogger("dynamo_backends")

_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of sched_setattr and sched_getattr, which the C library has no functions for."""

_SLICE_NS = 100_000_000  # the longest
_KEEP_POLICY = 0x08
_ATTRIBUTES = struct.Struct("IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, ...


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
