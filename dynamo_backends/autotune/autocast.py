"""The autocast in which a graph was captured, which other threads and processes do not see."""

import contextlib
from typing import Any

import torch


def autocast_here() -> str:
    """The data type of autocast on CPUs in this thread, such as "bfloat16"; empty: it is off."""
    if not torch.is_autocast_enabled("cpu"):
        return ""
    return str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")


def autocast_as(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast on CPUs as in another thread or process; `dtype` is what `autocast_here` told there.

    Nothing is kept for later calls: that memory belongs to all threads, and what was cast without
    gradients would be taken by calls with them.
    """
    if not dtype:  # as it is at the beginning of threads and processes
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, dtype), cache_enabled=False)
