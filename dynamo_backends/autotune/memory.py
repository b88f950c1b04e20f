"""How much a candidate lets the process grow."""

from collections.abc import Callable
from typing import Any

import torch

from dynamo_backends.bench.processes import peak_rss_bytes, reset_peak_rss, rss_bytes

GRAIN = 1 << 20
"""Bytes below which differences say nothing."""


def resident() -> int:
    """Resident memory of this process and what it has allocated on a GPU, in bytes."""
    return rss_bytes() + (torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0)


def growth(call: Callable[[], Any]) -> int:
    """Bytes by which memory grows at most during a call, as far as that can be told."""
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
