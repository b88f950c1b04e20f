"""Calls CUDA itself, and maps TensorRT's element types. Tests put a double in its place."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from dynamo_backends.graph.graph import cuda_unavailable_reason
from dynamo_backends.trt import vendor

_INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


class Cuda:
    """CUDA as torch has it.

    Attributes:
        kind: torch's type of the devices whose tensors TensorRT reads.
    """

    kind = "cuda"

    def __init__(self) -> None:
        self._local = threading.local()

    def why_not(self) -> str | None:
        """Returns why there is no device; None if there is one."""
        return cuda_unavailable_reason()

    def remedy(self) -> str:
        """Returns the command that shows or mends what is missing."""
        return "nvidia-smi" if torch.version.cuda else _INSTALL

    def describe(self, index: int) -> str:
        """Returns what engines that are compiled for a device depend on."""
        properties = torch.cuda.get_device_properties(index)
        return (
            f"{properties.name} {properties.major}.{properties.minor} "
            f"{properties.multi_processor_count} {properties.total_memory >> 30}"
        )

    def compute_capability(self, index: int) -> str:
        """Returns a device's compute capability, such as "9.0"."""
        major, minor = torch.cuda.get_device_capability(index)
        return f"{major}.{minor}"

    def is_capturing(self) -> bool:
        """Returns whether the current stream is being recorded as a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def stream(self, index: int) -> Iterator[int]:
        """The handle of a stream on which work of torch's current stream can go on.

        That is the current stream itself, unless it is the default one, on which TensorRT would
        wait for the device in every call: then another, which waits for the current one and for
        which the current one waits afterwards. Inside, the device is the current one.
        """
        with torch.cuda.device(index):
            current = torch.cuda.current_stream(index)
            if current.cuda_stream:
                yield current.cuda_stream
                return
            side = self._side_stream(index)
            side.wait_stream(current)
            yield side.cuda_stream
            current.wait_stream(side)

    def _side_stream(self, index: int) -> Any:
        known: dict[int, Any] = self._local.__dict__.setdefault("streams", {})
        if index not in known:
            known[index] = torch.cuda.Stream(index)
        return known[index]

    def synchronize(self, index: int) -> None:
        """Waits until a device has nothing to do."""
        torch.cuda.synchronize(index)


_driver: Any = Cuda()


def driver() -> Any:
    """Returns the CUDA driver, or the double that tests have installed for it."""
    return _driver


NAMES = {
    torch.bool: "BOOL",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float32: "FLOAT",
}
"""What TensorRT computes with: float64 would be computed in float32, int16 not."""


def to_tensorrt(dtype: torch.dtype) -> Any:
    """TensorRT's name of a torch dtype.

    Raises:
        KeyError: There is none; see `NAMES`.
    """
    return getattr(vendor.tensorrt().DataType, NAMES[dtype])
