"""Measures the memory of processes, and how much a call adds to that of this one."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GRAIN = 1 << 20
"""Bytes below which differences say nothing."""


def resident() -> int:
    """Resident memory of this process and what it has allocated on a GPU, in bytes."""
    return rss_bytes() + (torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0)


def growth(call: Callable[[], Any]) -> int:
    """Returns the bytes by which peak memory grows during a call, on CPU and GPU."""
    before, known = rss_bytes(), reset_peak_rss()
    on_gpu = torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    result = call()
    grown = max(0, peak_rss_bytes() - before) if known else 0
    if on_gpu:
        torch.cuda.synchronize()
        grown += torch.cuda.max_memory_allocated() - allocated
    del result
    return grown


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


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and those that it started; 0 if it has ended."""
    import psutil

    total = 0
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total
