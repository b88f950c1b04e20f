"""Defines `DeviceTensor`, whose contents live on a device unknown to torch.

To torch and to the user a `DeviceTensor` is a tensor of the CPU. It wraps an ordinary tensor, its
handle, whose storage knows where the contents are (`device_values`). Views are views of the handle,
so they share contents as in eager. AOT Autograd gives compiled graphs the handles.
"""

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils import _pytree as pytree

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.errors import DeviceError, first_line
from dynamo_backends.runtime.device_operators import run_operator
from dynamo_backends.runtime.device_values import (
    DeviceValue,
    RemoteDevice,
    attach_device_value,
    device_by_name,
    fetch_to_host,
    fills_storage,
    storage_value,
)


# In checkpoints of torch.distributed.checkpoint a tensor of which each process has a part is
# written in these parts, each by a process that has it; any other is written whole. A tensor is
# read whole, by each process.
def local_shard(handle: Tensor) -> tuple[tuple[int, ...], Tensor] | None:
    """Returns offsets and contents of this rank's shard; None if the tensor is whole."""
    value = storage_value(handle)
    if value is None or value.array is None or value.on_host:
        return None
    if not (fills_storage(handle) and handle.is_contiguous()):
        return None
    return value.home.local_shard(value.array) if value.array.shape == tuple(handle.shape) else None


def checkpoint_write_items(handle: Tensor, name: str) -> tuple[list[Any], bool]:
    """Returns torch.distributed.checkpoint write items, and whether they are sharded.

    Args:
        handle: Handle of a tensor that is to be written.
        name: In the checkpoint.

    Returns:
        The items, and whether it is this process's part alone.
    """
    found = local_shard(handle)
    if found is None:
        fetch_to_host(handle)  # where it has to be gathered for that, all processes are here
    offsets, part = ((0,) * handle.dim(), handle) if found is None else found
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(Size(offsets), part.shape),
        properties=TensorProperties.create_from_tensor(part),
        size=handle.shape,
    )
    kind = WriteItemType.TENSOR if found is None else WriteItemType.SHARD
    index = MetadataIndex(name, Size(offsets))
    return [WriteItem(index=index, type=kind, tensor_data=data)], found is not None


def checkpoint_chunks(handle: Tensor) -> list[Any]:
    """Returns chunk metadata (torch.distributed.checkpoint) of a tensor that is not sharded."""
    return [ChunkStorageMetadata(Size((0,) * handle.dim()), handle.shape)]


class _Thread(threading.local):
    takes_handles = False


_thread = _Thread()

_NOT_OURS = (
    "tensors on {} were passed to a graph of a backend that does not support them and would read "
    "storage without data. Compile with backend='openxla' or another backend of this package, or "
    "copy them to the CPU with dynamo_backends.xla.to_device(values, 'cpu')."
)


@contextmanager
def accept_device_handles() -> Iterator[None]:
    """Lets AOT Autograd pass `DeviceTensor` handles to graphs (context manager)."""
    before = _thread.takes_handles
    _thread.takes_handles = True
    try:
        yield
    finally:
        _thread.takes_handles = before


class DeviceTensor(Tensor):
    """A tensor subclass whose contents live on a device unknown to torch.

    Args:
        handle: An ordinary tensor, or a fake one while a graph is traced.
        home: The name of the device.
    """

    _handle: Tensor
    home: str
    _is_in_parts = False  # what was announced to torch.distributed.checkpoint last

    @staticmethod
    def __new__(cls, handle: Tensor, home: str) -> "DeviceTensor":
        """See the class."""
        made: DeviceTensor = private.make_wrapper(cls, handle)
        return made

    def __init__(self, handle: Tensor, home: str):
        self._handle = handle
        self.home = home

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        """Returns what AOT Autograd gives to compiled graphs, and what it guards."""
        return ["_handle"], self.home

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], home: str, outer_size: Any, outer_stride: Any
    ) -> "DeviceTensor":
        """Returns the reverse of `__tensor_flatten__`."""
        return wrap_handle(inner["_handle"], home)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operator on the handles."""
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        home = next(x.home for x in leaves if isinstance(x, DeviceTensor))
        handles = [handle_of(x) for x in leaves if isinstance(x, Tensor)]
        given, named = pytree.tree_map_only(Tensor, handle_of, (args, kwargs))
        if any(map(private.is_tracing_wrapper, handles)):
            if not _thread.takes_handles and any(map(private.is_functionalized, handles)):
                raise DeviceError(_NOT_OURS.format(home))
            results = func(*given, **named)
        else:
            results = run_operator(func, given, named, device_by_name(home))
        results = pytree.tree_map_only(Tensor, lambda t: wrap_handle(t, home), results)
        if func.is_view:
            pytree.tree_map_only(Tensor, private.mark_static, results)
        return private.return_and_correct_aliasing(func, args, kwargs, results)

    def host(self) -> Tensor:
        """Returns the handle after copying to the host; writes to it are not tracked."""
        return fetch_to_host(self._handle)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """As of a tensor on the CPU."""
        plain = self.host().detach()
        text = repr(plain.requires_grad_() if self.requires_grad and self.is_leaf else plain)
        if self.grad_fn is not None:
            text = f"{text[:-1]}, grad_fn=<{type(self.grad_fn).__name__}>)"
        return f"Parameter containing:\n{text}" if private.is_parameter(self) else text

    def __format__(self, spec: str) -> str:
        """As of a tensor on the CPU."""
        return format(self.host(), spec)

    def _expose(self) -> DeviceValue | None:
        """Gives others the handle's memory, to which they may write."""
        value = storage_value(self._handle)
        if value is not None:
            value.expose(self._handle)
        return value

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a NumPy array that shares host memory, as for CPU tensors."""
        if force:
            return self.host().detach().numpy(force=True)
        if self.requires_grad and torch.is_grad_enabled():
            return self._handle.detach().requires_grad_().numpy()  # which says what is wrong
        value = self._expose()
        array = self._handle.detach().numpy()
        if value is not None:
            value.end_exposure_with(array if array.base is None else array.base)
        return array

    def __array__(self, dtype: Any = None) -> Any:
        """See `numpy`."""
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """As of a tensor on the CPU, whose memory is what counts from now on."""
        self._expose()
        return self._handle.detach().__dlpack__(**options)

    def tolist(self) -> Any:
        """Returns nested lists of the elements, copied to the host."""
        return self.host().tolist()

    def data_ptr(self) -> int:
        """Returns the host address; contents count as shared with others from then on."""
        self._expose()
        return self._handle.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns what is saved is an ordinary tensor, which can be loaded anywhere."""
        plain = self.host().detach()
        if private.is_parameter(self):
            plain = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        elif self.requires_grad and self.is_leaf:
            plain.requires_grad_()
        return plain.__reduce_ex__(protocol)

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        """Returns what torch.distributed.checkpoint asks for; see `checkpoint_write_items`."""
        items, self._is_in_parts = checkpoint_write_items(self._handle, name)
        return items

    def __create_chunk_list__(self) -> list[Any]:
        """See `checkpoint_chunks`."""
        self._is_in_parts = False
        return checkpoint_chunks(self._handle)

    def __get_tensor_shard__(self, _: Any) -> Tensor:
        """Returns what was announced last: this process's part, or all."""
        found = local_shard(self._handle) if self._is_in_parts else None
        return self if found is None else found[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        """Returns a copy on the device; copies of views of one tensor are views of one."""
        if id(self) in memo:
            found: DeviceTensor = memo[id(self)]
            return found
        if not self.is_leaf:
            _refuse_copy(self)
        handle = _copied(self._handle, memo)
        made: Any = wrap_handle(handle, self.home)
        if private.is_parameter(self):
            made = torch.nn.Parameter(made, self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        made.__dict__.update(
            (k, copy.deepcopy(v, memo))
            for k, v in self.__dict__.items()
            if k not in ("_handle", "home", "_is_param")
        )
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        copied: DeviceTensor = made
        return copied

    @property
    def data(self) -> Tensor:
        """The detached tensor; assigning replaces the contents."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        given = (
            value
            if isinstance(value, DeviceTensor)
            else copy_to_device(value, device_by_name(self.home))
        )
        private.set_data(self, given)
        self._handle, self.home = given._handle, given.home


def _refuse_copy(tensor: Tensor) -> NoReturn:
    copy.deepcopy(torch.empty(0, requires_grad=True) + 1)  # torch's own error
    raise AssertionError(tensor)


def _copied(handle: Tensor, memo: dict[int, Any]) -> Tensor:
    """Returns a handle on a copy of the storage; one copy for all handles on it."""
    value = storage_value(handle)
    if value is None:
        copied: Tensor = copy.deepcopy(handle, memo)
        return copied
    storage = memo.get(id(value))
    if storage is None:
        storage = torch.UntypedStorage(handle.untyped_storage().nbytes())
        twin = DeviceValue(value.home, value.dtype, value.array, value.origin)
        twin.is_shared = value.is_shared = value.array is not None
        if value.array is None:
            storage.copy_(handle.untyped_storage())
        memo[id(value)] = storage
        attach_device_value(torch.empty(0).set_(storage), twin)
    return torch.empty(0, dtype=handle.dtype).set_(
        storage, handle.storage_offset(), handle.shape, handle.stride()
    )


def wrap_handle(handle: Tensor, home: str) -> DeviceTensor:
    """Wraps a handle as `DeviceTensor`; registers an ordinary tensor's storage."""
    if not private.is_tracing_wrapper(handle) and storage_value(handle) is None:
        attach_device_value(handle, DeviceValue(device_by_name(home), handle.dtype, None))
    return DeviceTensor(handle, home)


def copy_to_device(tensor: Tensor, home: RemoteDevice) -> DeviceTensor:
    """Copies a tensor to a device lazily: contents move on first use."""
    if isinstance(tensor, DeviceTensor):
        if tensor.home == home.name:
            return tensor
        tensor = tensor.host()
    plain = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
    ).copy_(tensor.detach())
    return wrap_handle(plain, home.name)


def handle_of(value: Any) -> Any:
    """Returns the handle of a `DeviceTensor`; other values unchanged."""
    return value._handle if isinstance(value, DeviceTensor) else value


def as_device_tensor(value: Any) -> Any:
    """Wraps a handle that has device contents; other values unchanged."""
    if type(value) is not Tensor:
        return value
    found = storage_value(value)
    return value if found is None else DeviceTensor(value, found.home.name)


def device_value_of(tensor: Tensor) -> DeviceValue | None:
    """Returns the `DeviceValue` of a `DeviceTensor`; None for other tensors."""
    return storage_value(tensor._handle) if isinstance(tensor, DeviceTensor) else None


def move_leaf(tensor: Tensor, home: RemoteDevice | None) -> Tensor:
    """Returns a leaf tensor on a device, or on the host for None; itself if there.

    Args:
        tensor: From anywhere; returned as it is if it is there.
        home: The device.
    """
    if home is None:
        made = tensor.host().clone() if isinstance(tensor, DeviceTensor) else tensor.detach()
    else:
        made = copy_to_device(tensor, home)
        value = device_value_of(made)
        assert value is not None
        value.ensure_on_device(handle_of(made), tuple(made.shape))
    return tensor if made is tensor else _leaf(tensor, made)


def _leaf(tensor: Tensor, made: Tensor) -> Tensor:
    """Returns a leaf of the kind that `tensor` is, with other contents."""
    if private.is_parameter(tensor):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def move_in_place(tensor: Tensor, home: RemoteDevice | None) -> None:
    """Moves a leaf tensor to a device in place; DeviceError if torch cannot swap it.

    Args:
        tensor: A leaf.
        home: The device; None: the host.

    Raises:
        DeviceError: torch cannot exchange it.
    """
    current = tensor.home if isinstance(tensor, DeviceTensor) else None
    if current == (None if home is None else home.name):
        return
    swap_in_contents(tensor, move_leaf(tensor, home))


def swap_in_contents(tensor: Tensor, made: Tensor) -> None:
    """Replaces a leaf tensor's contents in place with those of another tensor.

    Args:
        tensor: A leaf.
        made: What nobody else refers to; may be no parameter where `tensor` is one.

    Raises:
        DeviceError: torch cannot exchange it.
    """
    try:
        with private.keep_node_hooks(tensor):
            torch.utils.swap_tensors(tensor, _leaf(tensor, made))
    except RuntimeError as error:
        raise DeviceError(
            f"a tensor of shape {list(tensor.shape)} cannot be moved, because other objects "
            f"reference it ({first_line(error)}). Move the model before you compile or train it."
        ) from error
