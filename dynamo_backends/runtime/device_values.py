"""Contents of storages that live on a device whose memory torch does not share.

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

from dynamo_backends.interface.errors import DeviceError, RankError, text_of


class Home(Protocol):
    """A device that keeps values, each as one array in the order of the storage's memory."""

    @property
    def name(self) -> str:
        """Returns the device's name, such as "tpu:0"."""

    def upload(self, tensor: Tensor) -> Any:
        """Returns an array with the contents of a row-major tensor, which may change afterwards."""

    def download(self, array: Any, flat: Tensor) -> None:
        """Writes an array's contents to a tensor of one dimension.

        Raises:
            DeviceError: What computes the array has failed.
        """

    def part_of(self, array: Any) -> tuple[tuple[int, ...], Tensor] | None:
        """Returns offset and contents of this process's part of an array; None if it has all."""


_homes: dict[str, Home] = {}

Computer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator, given its arguments with handles for tensors, or returns NotImplemented."""

_computers: dict[str, Computer] = {}


def register_device(home: Home) -> None:
    """Registers a device under its name, so that tensors can be mapped back to it."""
    _homes[home.name] = home


def register_computer(name: str, compute: Computer) -> None:
    """Says what runs single operators on a device."""
    _computers[name] = compute


def computer_of(name: str) -> Computer | None:
    """Returns what runs single operators on a device; None: nothing does."""
    return _computers.get(name)


def home_named(name: str) -> Home:
    """The device that was registered under a name."""
    return _homes[name]


_ATTRIBUTE = "_dynamo_backends_value"  # torch keeps the Python object of a storage while that lives


class DeviceValue:
    """The contents of one storage.

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

    def __init__(self, home: Home, dtype: torch.dtype, array: Any | None, origin: str = ""):
        self.home = home
        self.dtype = dtype
        self.array = array
        self.origin = origin
        self.on_host = array is None
        self.is_shared = False
        self.stamp = 0
        self._aliases = 0

    def fetch(self, tensor: Tensor) -> None:
        """Brings the contents to the host.

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
                f"{self.origin or 'a copy'} failed on {self.home.name}: {text_of(error)}"
            ) from error
        self.on_host = True

    def send(self, tensor: Tensor, shape: Sequence[int]) -> Any:
        """Returns the array on the device, brought there if need be.

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

    def note_write(self) -> None:
        """The storage's memory has been written to."""
        self.array = None
        self.on_host = True
        self.stamp += 1

    def replace(
        self, tensor: Tensor, array: Any, origin: str = "", is_shared: bool = False
    ) -> None:
        """Gives the storage new contents, which are on the device.

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
            self.fetch(tensor)

    @property
    def is_exposed(self) -> bool:
        """Returns whether others than torch may write to the memory on the host."""
        return self._aliases > 0

    def expose(self, tensor: Tensor) -> None:
        """Says that memory on the host is read and written past torch from now on.

        Args:
            tensor: On the storage.
        """
        self.fetch(tensor)
        self.array = None
        self._aliases += 1

    def conceal_after(self, alias: Any) -> None:
        """Says that an exposure ends with the life of an object."""
        weakref.finalize(alias, self._conceal)

    def _conceal(self) -> None:
        self._aliases -= 1
        self.stamp += 1


def value_of(tensor: Tensor) -> DeviceValue | None:
    """The contents of a tensor's storage if a device keeps them; None: it is an ordinary one."""
    value: DeviceValue | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    return value


def keep(tensor: Tensor, value: DeviceValue) -> Tensor:
    """Says of an ordinary tensor's storage that its contents are kept on a device."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, value)
    return tensor


def on_device(
    home: Home, array: Any, shape: Sequence[int], dtype: torch.dtype, origin: str = ""
) -> Tensor:
    """Returns a tensor whose contents are an array on a device.

    Args:
        home: The device.
        array: Row-major.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        origin: What computed the array.
    """
    return keep(torch.empty(shape, dtype=dtype), DeviceValue(home, dtype, array, origin))


def on_host(tensor: Tensor) -> Tensor:
    """The same tensor, after its contents were brought to the host if they were not there."""
    value = value_of(tensor)
    if value is not None:
        value.fetch(tensor)
    return tensor


def fills_storage(tensor: Tensor) -> bool:
    """Returns whether a tensor's elements are all of its storage, as the value has them."""
    value = value_of(tensor)
    same = value is None or value.dtype is tensor.dtype
    size = math.prod(tensor.shape) * tensor.element_size()
    return same and tensor.untyped_storage().nbytes() == size


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    storage = tensor.untyped_storage()
    count = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(storage, 0, (count,), (1,))
