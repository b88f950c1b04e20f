"""The memory of the process."""

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return None


def return_free_memory() -> None:
    """Gives memory that compiling or loading took back to the system; malloc would keep it."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
