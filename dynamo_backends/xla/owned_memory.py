"""Memory of XLA's in which tensors of torch's live, so that XLA can write over them.

A donated input's memory becomes that of an output, but only if XLA owns it alone. So what a step
updates, and nobody but its tensor refers to, moves, before the first step, into memory of XLA's
(`OwnedBuffer`), and torch sees it there through tensors that know the address but hold no reference
that XLA could count. Their address never changes after that, and neither side copies. All other
memory stays where it is, and gets the results copied (see `launch`).
"""

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import is_sole_storage_owner
from dynamo_backends.graph.layouts import InputConverter
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.arrays import find_tracked_buffer, tensor_to_numpy
from dynamo_backends.xla.runtime import PjrtDevice


class OwnedBuffer:
    """Memory of XLA's in which a tensor of torch's lives.

    When a step has run, another buffer owns the memory. The owner is told before the run where that
    buffer will be, and looks there: nothing has to be done afterwards that could be interrupted.

    Args:
        buffer: Owns the memory.
        like: A dense tensor whose shape, strides and dtype the memory is to have.

    Attributes:
        pointer: Its address.
    """

    def __init__(self, buffer: Any, like: Tensor):
        self.pointer: int = buffer.unsafe_buffer_pointer()
        self._results: list[list[Any]] = []
        self._place = 0
        self._buffer = buffer
        self._shape, self._stride, self._dtype = like.shape, like.stride(), like.dtype
        self._size = like.numel() * like.element_size()

    @property
    def buffer(self) -> Any:
        """The owner of the memory."""
        self.settle()
        return self._buffer

    def expect(self, results: list[list[Any]], place: int) -> None:
        """Says, before a run, where the next owner will be.

        Args:
            results: Will get one element, the list of the results, if the run succeeds.
            place: Which of these.
        """
        self.settle()
        self._place = place
        self._results = results

    def settle(self) -> None:
        """Lets go of the results of the last run but for the owner of this memory."""
        if self._results:
            owner = self._results[0][self._place]
            if owner.unsafe_buffer_pointer() == self.pointer:
                self._buffer = owner
            else:  # it was given a copy, because the memory was in use
                ctypes.memmove(self.pointer, owner.unsafe_buffer_pointer(), self._size)
            self._results = []

    def is_filled_by(self, tensor: Tensor) -> bool:
        """Returns whether a tensor at this address is all of the memory."""
        return (
            tensor.shape == self._shape
            and tensor.stride() == self._stride
            and tensor.dtype == self._dtype
        )

    def tensor(self) -> Tensor:
        """A tensor on this memory, which is valid for as long as any tensor on it exists."""
        memory = (ctypes.c_char * self._size).from_address(self.pointer)
        memory.owner = self  # type: ignore[attr-defined]
        flat = torch.frombuffer(memory, dtype=self._dtype)
        return flat.as_strided(self._shape, self._stride)


_owned: weakref.WeakValueDictionary[int, OwnedBuffer] = weakref.WeakValueDictionary()


def find_owned(tensor: Tensor) -> OwnedBuffer | None:
    """Returns the XLA-owned buffer that a tensor fills, or None."""
    owner = _owned.get(tensor.data_ptr())
    return owner if owner is not None and owner.is_filled_by(tensor) else None


def move_to_xla(tensor: Tensor, importer: InputConverter, device: PjrtDevice) -> OwnedBuffer | None:
    """Moves a tensor to XLA-owned memory, in place; returns None if it is not movable.

    What a program of XLA's has returned is there already, and is not copied.

    Args:
        tensor: On the CPU.
        importer: Importer of the program that will be given the memory.
        device: The CPU.
    """
    buffer = find_tracked_buffer(tensor, importer.dense_shape)
    if not is_movable(tensor, is_returned=buffer is not None):
        return None
    if buffer is None:
        buffer = _jaxlib.copy_to_device(device.handle, tensor_to_numpy(importer(tensor)))
    owner = OwnedBuffer(buffer, tensor)
    _owned[owner.pointer] = owner
    tensor.data = owner.tensor()
    return owner


def is_movable(tensor: Tensor, is_returned: bool = False) -> bool:
    """Returns whether a tensor is the only owner of its memory, which may be replaced.

    Memory that torch's allocator has not made (of files, of numpy, of other processes) belongs to
    somebody else, and so does what somebody else refers to: a view, an array, a DLPack capsule.

    Args:
        tensor: On the CPU.
        is_returned: Whether a program of XLA's has made its memory.
    """
    storage = tensor.untyped_storage()
    if not is_returned and (not storage.resizable() or storage.is_shared()):
        return False
    size = tensor.numel() * tensor.element_size()
    is_whole = size > 0 and storage.nbytes() == size
    del storage  # a reference, which `is_sole_storage_owner` would count
    return is_whole and is_sole_storage_owner(tensor)
