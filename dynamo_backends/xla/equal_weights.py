"""Prepared weights that are equal exist once, for however many programs they were prepared.

A graph of changing sizes has a program for each of many bounds, and each prepares the same weights.
What it has prepared is compared with what others have, bit by bit, so it does not matter when
weights changed, or whether anybody noticed. Nobody writes to prepared weights.
"""

import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.runtime.freezing import bits_of
from dynamo_backends.xla import _jaxlib

LEAST = 1 << 12
"""Bytes; smaller ones are not looked for."""

_SAMPLE = 16  # elements

Import = Callable[[Tensor], Any]
"""Makes a buffer that shares a tensor's memory, or has a copy of it."""


class EqualWeights:
    """Buffers of prepared weights, known for as long as programs hold them."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        self._lock = fork_safe_lock()

    def buffers(
        self,
        prepared: Sequence[Tensor],
        weights: Collection[Tensor],
        place: Hashable,
        take_in: Import,
    ) -> list[Any]:
        """Returns a buffer for each prepared weight: that of an equal one, if there is one.

        Args:
            prepared: Contiguous tensors on the CPU.
            weights: What they were made of. A prepared weight that shares memory with one of them
                has a buffer of its own, since the caller writes there.
            place: The device that buffers are on.
            take_in: Makes a new buffer.
        """
        callers = {w.untyped_storage().data_ptr() for w in weights}
        return [
            take_in(tensor)
            if tensor.nbytes < LEAST or tensor.untyped_storage().data_ptr() in callers
            else self._one(tensor, place, take_in)
            for tensor in prepared
        ]

    def _one(self, tensor: Tensor, place: Hashable, take_in: Import) -> Any:
        bits = bits_of(tensor).view(-1)
        sample = bits[:: len(bits) // _SAMPLE].tolist()
        key = (place, tensor.dtype, tensor.shape, *sample)
        with self._lock:
            known = self._known.get(key)
            if known is not None and torch.equal(_bits(known), bits):
                return known
            made = self._known[key] = take_in(tensor)
            return made


def _bits(buffer: Any) -> Tensor:
    return bits_of(from_dlpack(_jaxlib.export_dlpack(buffer))).view(-1)


equal_weights = EqualWeights()
"""Those of this process."""
