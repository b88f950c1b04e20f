"""What is compared with compiled code is computed by torch, on the host."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    depth = 0


_thread = _Thread()


@contextmanager
def computing_reference() -> Iterator[None]:
    """Inside, operators on tensors that live on a device run on the host."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def is_reference() -> bool:
    """Returns whether the calling thread computes what compiled code is compared with."""
    return _thread.depth > 0
