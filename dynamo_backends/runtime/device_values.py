"""Tracks storages whose contents live on a device unknown to torch.

A storage of torch's is the one place where contents are known, as in eager: all tensors on it,
views too, have the same contents. What is added here is that these may be on a device
(`DeviceValue`), on the host, or on both. The storage's memory on the host is address space that
nobody touches until somebody reads.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dynamo_backends.interface.errors import DeviceError, RankError, error_text


class RemoteDevice(Protocol):
    """A device that keeps each storage's contents as one array."""

    @property
    def name(self) -> str:
        """The device name, such as "tpu:0"."""

    def upload(self, tensor: Tensor) -> Any:
        """Copies a row-major host tensor to a device array."""

    def download(self, array: Any, flat: Tensor) -> None:
        """Copies a device array to a one-dimensional host tensor.

        Raises:
            DeviceError: What computes the array has failed.
        """

    def local_shard(self, array: Any) -> tuple[tuple[int, ...], Tensor] | None:
        """Returns offsets and contents of this rank's shard; None if the array is whole."""


_homes: dict[str, RemoteDevice] = {}

Computer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator, given its arguments with handles for tensors, or returns NotImplemented."""

_computers: dict[str, Computer] = {}


def register_device(home: RemoteDevice) -> None:
    """Registers a device by its name."""
    _homes[home.name] = home


def register_operator_runner(name: str, compute: Computer) -> None:
    """Registers the function that runs single operators on a device."""
    _computers[name] = compute


def operator_runner(name: str) -> Computer | None:
    """Returns the function that runs single operators on a device; None if none."""
    return _computers.get(name)


def device_by_name(name: str) -> RemoteDevice:
    """Returns the registered device of a name; KeyError if unknown."""
    return _homes[name]


_ATTRIBUTE = "_dynamo_backends_value"  # torch keeps the Python object of a storage while that lives


class DeviceValue:
    """The contents of one storage: on the device, on the host, or both.

    Args:
        home: The device.
        dtype: Dtype of the elements.
        array: On the device; None: the contents are on the host alone.
        origin: What computed them, for errors.

    Attributes:
        on_host: Whether the storage's memory has the contents.
        is_shared: Whether other storages may have the same array, which nobody may write over then.
        stamp: Counts the writes.
    """

    def __init__(self, home: RemoteDevice, dtype: torch.dtype, array: Any | None, origin: str = ""):
        self.home = home
        self.dtype = dtype
        self.array = array
        self.origin = origin
        self.on_host = array is None
        self.is_shared = False
        self.stamp = 0
        self._aliases = 0

    def ensure_on_host(self, tensor: Tensor) -> None:
        """Copies the contents to the host, unless they are there.

        Args:
            tensor: On the storage.
        """
        if self.on_host:
            return
        try:
            self.home.download(self.array, _flat(tensor, self.dtype))
        except RankError:
            raise
        except Exception as error:
            raise DeviceError(
                f"{self.origin or 'a copy'} failed on {self.home.name}: {error_text(error)}"
            ) from error
        self.on_host = True

    def ensure_on_device(self, tensor: Tensor, shape: Sequence[int]) -> Any:
        """Returns the device array, uploading host contents if needed.

        Args:
            tensor: On the storage.
            shape: That the array is to have if it is brought there.
        """
        if self.array is not None and not self.is_exposed:
            return self.array
        array = self.home.upload(_flat(tensor, self.dtype).view(tuple(shape)))
        self.array = None if self.is_exposed else array
        self.is_shared = False
        return array

    def mark_host_written(self) -> None:
        """Records a write to host memory; the device array becomes invalid."""
        self.array = None
        self.on_host = True
        self.stamp += 1

    def set_device_array(
        self, tensor: Tensor, array: Any, origin: str = "", is_shared: bool = False
    ) -> None:
        """Sets a new device array as the contents.

        Args:
            tensor: On the storage.
            array: The new contents.
            origin: What computed them.
            is_shared: Whether another storage has them, too.
        """
        self.array, self.origin, self.is_shared = array, origin, is_shared
        self.on_host = False
        self.stamp += 1
        if self.is_exposed:
            self.ensure_on_host(tensor)

    @property
    def is_exposed(self) -> bool:
        """Whether code other than torch, such as NumPy, may write to host memory."""
        return self._aliases > 0

    def expose(self, tensor: Tensor) -> None:
        """Copies contents to the host and marks that memory as shared with others.

        Args:
            tensor: On the storage.
        """
        self.ensure_on_host(tensor)
        self.array = None
        self._aliases += 1

    def end_exposure_with(self, alias: Any) -> None:
        """Ends the sharing of host memory when an object is garbage-collected."""
        weakref.finalize(alias, self._conceal)

    def _conceal(self) -> None:
        self._aliases -= 1
        self.stamp += 1


def storage_value(tensor: Tensor) -> DeviceValue | None:
    """Returns the `DeviceValue` of a tensor's storage; None for an ordinary tensor."""
    value: DeviceValue | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    return value


def attach_device_value(tensor: Tensor, value: DeviceValue) -> Tensor:
    """Attaches a `DeviceValue` to a tensor's storage; returns the tensor."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, value)
    return tensor


def make_device_handle(
    home: RemoteDevice, array: Any, shape: Sequence[int], dtype: torch.dtype, origin: str = ""
) -> Tensor:
    """Returns an ordinary tensor whose storage refers to a device array.

    Args:
        home: The device.
        array: Row-major.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        origin: What computed the array.
    """
    return attach_device_value(
        torch.empty(shape, dtype=dtype), DeviceValue(home, dtype, array, origin)
    )


def fetch_to_host(tensor: Tensor) -> Tensor:
    """Returns the tensor after copying its contents to the host if needed."""
    value = storage_value(tensor)
    if value is not None:
        value.ensure_on_host(tensor)
    return tensor


def fills_storage(tensor: Tensor) -> bool:
    """Returns whether a tensor covers its whole storage with the value's dtype."""
    value = storage_value(tensor)
    same = value is None or value.dtype is tensor.dtype
    size = math.prod(tensor.shape) * tensor.element_size()
    return same and tensor.untyped_storage().nbytes() == size


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    storage = tensor.untyped_storage()
    count = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(storage, 0, (count,), (1,))
