"""Measuring in processes of their own, where nothing is warm and memory starts from nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MARK = "@measured "


class ChildError(RuntimeError):
    """A measuring process failed; the message ends with what it printed."""


def run_child(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> dict[str, Any]:
    """Runs a Python program that calls `hand_back`, and returns what it handed back.

    Args:
        arguments: What follows `python` on the command line.
        environment: Variables set in addition to this process's.
        timeout_s: Seconds after which the process is ended.

    Raises:
        ChildError: It failed, or handed nothing back.
    """
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"{' '.join(arguments)}: not done after {timeout_s:.0f} s") from error
    for line in reversed(done.stdout.splitlines()):
        if done.returncode == 0 and line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    tail = (done.stderr or done.stdout)[-2000:]
    raise ChildError(f"{' '.join(arguments)}: exit status {done.returncode}\n{tail}")


def hand_back(**values: Any) -> None:
    """In the child: gives values that JSON can hold to the process that called `run_child`."""
    print(_MARK + json.dumps(values), flush=True)


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far.

    On Linux read from /proc: `ru_maxrss` survives exec, so a child would report its parent's size.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss() -> bool:
    """Lets `peak_rss_bytes` begin anew; returns False where the system cannot (only Linux can)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def rss_bytes() -> int:
    """Resident memory of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import psutil

        return psutil.Process().memory_info().rss
    return pages * os.sysconf("SC_PAGE_SIZE")
