"""Processes in which something is tried that may crash or hang."""

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1  # `man 2 prctl`


def kill(child: "subprocess.Popen[Any]") -> None:
    """Ends a process, and those that it started if it leads a group."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (AttributeError, OSError):
        child.kill()
    child.wait()


def end_with_parent() -> None:
    """Has Linux end this process when the thread that started it ends, however it does.

    Reading until there is no more does not do: another process may hold the other end of a pipe,
    and compilers in C++ keep Python's threads from looking.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def environment() -> dict[str, str]:
    """For another process: the same modules and packages as here."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
