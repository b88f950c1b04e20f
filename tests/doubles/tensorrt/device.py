"""The CPU in the place of a CUDA device: streams are numbers that the double checks."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import torch

_handles = itertools.count(0x7F00)
_thread = threading.local()


def active() -> list[int]:
    """Handles of the streams on which this thread may launch work now, the current one last."""
    found: list[int] = _thread.__dict__.setdefault("active", [])
    return found


class HostDevice:
    """See `dynamo_backends.trt.device.Cuda`.

    Attributes:
        kind: torch's type of the devices.
        name: What engines depend on.
        syncs: How often somebody waited for the device.
        capturing: Whether what is launched is recorded.
    """

    kind = "cpu"

    def __init__(self) -> None:
        self.name = "double 8.0"
        self.syncs = 0
        self.capturing = False

    def why_not(self) -> str | None:
        """There is always a CPU."""
        return None

    def describe(self, index: int) -> str:
        """See `Cuda`."""
        return self.name

    def compute_capability(self, index: int) -> str:
        """See `Cuda`."""
        return self.name.split()[-1]

    def is_capturing(self) -> bool:
        """See `Cuda`."""
        return self.capturing

    @contextlib.contextmanager
    def stream(self, index: int) -> Iterator[int]:
        """One stream per thread, as torch has."""
        if not hasattr(_thread, "handle"):
            _thread.handle = next(_handles)
        active().append(_thread.handle)
        try:
            yield _thread.handle
        finally:
            active().pop()

    def synchronize(self, index: int) -> None:
        """Work is done when it is launched."""
        self.syncs += 1
        assert torch.device("cpu", index).index == 0
