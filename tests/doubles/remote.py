"""A device of XLA's that shares no memory with torch, counts transfers and can take long for them.

Arrays on it are opaque: whoever reads one without the device's `download`, through numpy, DLPack or
a pointer, gets an error.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from torch import Tensor

from dynamo_backends.xla import _jaxlib, options, runtime
from dynamo_backends.xla.arrays import tensor_from_numpy, tensor_to_numpy
from dynamo_backends.xla.runtime import PjrtDevice, open_device

PLATFORM = "remote"
"""XLA has no lowerings for it: programs have those for any platform."""


class UnannouncedReadError(RuntimeError):
    """Somebody read the memory of a device past its transfers."""


class RemoteArray:
    """An array on the double.

    Args:
        source: XLA's array, or what gives it when it has arrived.
        shape: Of the array.
    """

    def __init__(self, source: Any, shape: tuple[int, ...]):
        self._source = source
        self.shape = shape

    def arrived(self) -> Any:
        """XLA's array; for the double alone."""
        if isinstance(self._source, Future):
            self._source = self._source.result()
        return self._source

    def is_deleted(self) -> bool:
        """Whether it was donated."""
        return bool(self.arrived().is_deleted())

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UnannouncedReadError("memory of a device was read without a download")

    __array__ = __dlpack__ = unsafe_buffer_pointer = __float__ = __int__ = __iter__ = _refuse


@dataclass
class Traffic:
    """What was moved.

    Attributes:
        uploads: Shapes of the arrays that went to the device, in order.
        downloads: Shapes of those that came from it.
        seconds: How long each transfer takes, besides the copy.
    """

    uploads: list[tuple[int, ...]] = field(default_factory=list)
    downloads: list[tuple[int, ...]] = field(default_factory=list)
    seconds: float = 0.0

    @contextmanager
    def counted(self) -> Iterator["Traffic"]:
        """Inside, and afterwards: only what is moved inside."""
        inside = Traffic(seconds=self.seconds)
        before = len(self.uploads), len(self.downloads)
        try:
            yield inside
        finally:
            inside.uploads = self.uploads[before[0] :]
            inside.downloads = self.downloads[before[1] :]


@dataclass(frozen=True)
class RemoteDouble(PjrtDevice):
    """The device; its programs are those of a CPU.

    Attributes:
        traffic: What was moved.
        link: Moves one array after the other.
    """

    traffic: Traffic = field(default_factory=Traffic, hash=False)
    link: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def upload(self, tensor: Tensor) -> Any:
        """See `Home.upload`: returns at once."""
        array = np.array(tensor_to_numpy(tensor))
        self.traffic.uploads.append(array.shape)

        def move() -> Any:
            time.sleep(self.traffic.seconds)
            return _jaxlib.copy_to_device(self.handle, array)

        return RemoteArray(self.link.submit(move), array.shape)

    def download(self, array: RemoteArray, flat: Tensor) -> None:
        """See `Home.download`: waits."""
        self.traffic.downloads.append(array.shape)
        found = array.arrived()
        found.block_until_ready()
        time.sleep(self.traffic.seconds)
        flat.copy_(tensor_from_numpy(np.array(found)).view(-1))

    def execute(self, call: Callable[[list[Any]], Any], arrays: list[Any]) -> list[Any]:
        """See `Device.execute`."""
        return [_arrived(x) for x in super().execute(call, [x.arrived() for x in arrays])]


def _arrived(array: Any) -> RemoteArray:
    return RemoteArray(array, tuple(array.shape))


def _open(index: int) -> RemoteDouble:
    client = _jaxlib.make_cpu_client(asynchronous=True)
    return RemoteDouble(PLATFORM, client, client.local_devices()[0], os.getpid(), index)


@functools.cache
def _add_platform() -> None:
    """Makes XLA's devices include the double, for the rest of the process."""
    connect = runtime._connect

    def connect_any(platform: str, index: int) -> PjrtDevice:
        return _open(index) if platform == PLATFORM else connect(platform, index)

    runtime._connect = connect_any
    mlir._platforms_with_donation.append(PLATFORM)
    options.PLATFORMS = (*options.PLATFORMS, PLATFORM)


def remote_double(index: int = 0) -> RemoteDouble:
    """The double, which options can name from now on: `options={"device": "remote"}`."""
    _add_platform()
    device = open_device(PLATFORM, index)
    assert isinstance(device, RemoteDouble)
    return device


__all__ = ["RemoteDouble", "Traffic", "UnannouncedReadError", "remote_double"]
