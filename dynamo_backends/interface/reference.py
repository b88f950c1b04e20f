"""Runs eager's reference computations, with which compiled code is compared, on the host."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    depth = 0


_thread = _Thread()


@contextmanager
def computing_reference() -> Iterator[None]:
    """Runs operators on tensors of other devices on the host inside the block."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def is_reference() -> bool:
    """Returns whether the calling thread computes a reference."""
    return _thread.depth > 0
