"""Marks threads that compute eager's reference results, on the host."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    depth = 0


_thread = _Thread()


@contextmanager
def computing_reference() -> Iterator[None]:
    """Runs operators on other devices' tensors on the host (context manager)."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def is_computing_reference() -> bool:
    """Returns whether this thread is in `computing_reference()`."""
    return _thread.depth > 0
