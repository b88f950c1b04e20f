"""Makes malloc keep freed memory, to avoid page faults at each run.

A runtime that allocates its temporaries anew in each run pays for it: glibc maps a block of more
than 32 MiB from the system and unmaps it when it is freed, and the first write to each of its pages
is a page fault. For a training step that takes 400 MiB these are a fifth of its time.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

LEAST = 4 << 20
"""Bytes: what a smaller program frees malloc mostly keeps by itself."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h

_USERS = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables of the environment by which users set the same; see `man 3 mallopt`."""


def keep_freed_memory(temporary_bytes: int) -> None:
    """Makes glibc's malloc keep freed memory for the rest of the process.

    That is for a program whose runs allocate much. It holds for the whole process, torch's tensors
    included; `return_free_memory` still gives free pages back to the system. Nothing is done where
    malloc is not glibc's, where the environment sets these parameters of malloc, and with
    `DYNAMO_BACKENDS_RESERVE=0`.

    Args:
        temporary_bytes: What a run of the program allocates and frees.
    """
    if temporary_bytes >= LEAST and os.environ.get("DYNAMO_BACKENDS_RESERVE", "1") != "0":
        _keep()


@functools.cache
def _keep() -> bool:
    """Returns whether malloc took the parameters. Without blocks of their own all are in heaps."""
    mallopt = _function("mallopt")
    if mallopt is None or any(name in os.environ for name in _USERS):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


def return_free_memory() -> None:
    """Returns free heap memory to the system (`malloc_trim`)."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    """Returns a function of glibc; None where the C library is another one."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None
