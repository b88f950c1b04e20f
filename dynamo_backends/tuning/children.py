"""Processes in which something is tried that may crash or hang."""

import os
import signal
import subprocess
import sys
from typing import Any


def kill(child: "subprocess.Popen[Any]") -> None:
    """Ends a process that has a session of its own, and those that it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (AttributeError, OSError):
        child.kill()
    child.wait()


def environment() -> dict[str, str]:
    """For another process: the same modules and packages as here."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
