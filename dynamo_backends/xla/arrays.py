"""Tensors as numpy arrays and back; results that XLA may write over; a bound on work in flight."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamo_backends.graph.layouts import to_row_major
from dynamo_backends.runtime import staging
from dynamo_backends.xla.dtypes import to_jax

# Types that numpy itself lacks (ml_dtypes adds them), and what torch hands their bits over as.
_CARRIERS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def tensor_to_numpy(tensor: Tensor) -> np.ndarray:
    """Converts a tensor to a numpy array, sharing memory if possible."""
    tensor = to_row_major(tensor.cpu())
    carrier = _CARRIERS.get(tensor.dtype)
    if carrier is None:
        return tensor.numpy()
    return tensor.view(carrier).numpy().view(to_jax(tensor.dtype))


def tensor_from_numpy(array: np.ndarray) -> Tensor:
    """Returns the tensor that shares a numpy array's memory, any dtype that XLA has."""
    for dtype, carrier in _CARRIERS.items():
        if array.dtype == to_jax(dtype):
            name = str(carrier).removeprefix("torch.")
            return torch.from_numpy(array.view(name)).view(dtype)
    return torch.from_numpy(array)


MOST = 32
"""Largest number of launched programs. Each holds its results and what it reads."""


class InFlight:
    """Bounds how many launched programs may be unfinished on a device.

    Args:
        most: Number that may be unfinished when the next one is launched.
        wait: Waits for an array.
    """

    def __init__(self, most: int = MOST, wait: Callable[[Any], Any] | None = None):
        self._most = most
        self._wait = wait or (lambda array: array.block_until_ready())
        self._launched: deque[Any] = deque()

    def note(self, results: Sequence[Any]) -> None:
        """Notes a launch; waits for the oldest ones if there are too many.

        Args:
            results: Arrays that the program makes; the smallest is held until it is waited for.
        """
        if results:
            self._launched.append(min(results, key=lambda array: array.size))
        self._keep(self._most)

    def drain(self) -> None:
        """Waits for all launched programs."""
        self._keep(0)

    def _keep(self, most: int) -> None:
        while len(self._launched) > most:
            oldest = self._launched.popleft()
            with contextlib.suppress(Exception):  # whoever reads a result is told
                if not oldest.is_deleted():
                    self._wait(oldest)


_returned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def outputs_worth_tracking(values: Sequence[Tensor]) -> list[int]:
    """Returns indices of outputs large enough that donating them later beats copying.

    Args:
        values: Fake tensors, one per result.
    """
    sizes = [v.numel() * v.element_size() for v in values]
    return [k for k, size in enumerate(sizes) if size > staging.LIMIT]


def track_output_buffer(buffer: Any) -> None:
    """Remembers an XLA output buffer by its address, so that it can be donated later."""
    _returned[buffer.unsafe_buffer_pointer()] = buffer


def find_tracked_buffer(tensor: Tensor, shape: Sequence[int]) -> Any | None:
    """Returns the tracked XLA buffer behind a tensor's memory, or None.

    Args:
        tensor: On the CPU.
        shape: In the order of memory.
    """
    buffer = _returned.get(tensor.data_ptr())
    if buffer is None or buffer.is_deleted():
        return None
    fits = buffer.shape == tuple(shape) and buffer.dtype == to_jax(tensor.dtype)
    return buffer if fits else None
