"""Tensors of a step that share memory: parameters tied by `.data`, views of a flat parameter.

A graph cannot hold two inputs that lie in the same memory if it writes to one of them. So the
memory that tensors share is one input, and in the graph they are views of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamo_backends._torch_private import storage_id
from dynamo_backends.graph.layouts import row_major_strides
from dynamo_backends.interface.errors import StepCaptureError
from dynamo_backends.runtime.device_tensor import handle_of

Key = tuple[int, bool]
"""A slot, and whether its gradient is meant."""


@dataclass(frozen=True)
class View:
    """The position of a tensor in memory that it shares."""

    base: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, base: Tensor) -> Tensor:
        """The tensor as a view of the memory, in one dimension; with a version of its own."""
        order = sorted(range(len(self.size)), key=self.stride.__getitem__, reverse=True)
        size = [self.size[d] for d in order]
        if tuple(self.stride[d] for d in order) == row_major_strides(size):
            # Backends know slices better than as_strided.
            part = base[self.offset : self.offset + math.prod(size)].view(size)
            return part.permute(sorted(range(len(order)), key=order.__getitem__)).data
        return base.as_strided(self.size, self.stride, self.offset).data


class Aliases:
    """Groups of tensors that share memory.

    Args:
        tensors: Parameters, buffers, state, and gradients, by slot.
        names: What users call them.

    Attributes:
        bases: The memory that several share, each in one dimension.
        views: How these lie in it.
        names: One per base, for people.

    Raises:
        StepCaptureError: Tensors of different dtypes share memory.
    """

    def __init__(self, tensors: Mapping[Key, Tensor], names: Mapping[Key, str]):
        self.bases: list[Tensor] = []
        self.views: dict[Key, View] = {}
        self.names: list[str] = []
        for group in overlapping(tensors):
            self._add({key: tensors[key] for key in group}, [names[key] for key in group])
        self._addresses = [(key, _address(tensors[key])) for key in self.views]

    def _add(self, group: dict[Key, Tensor], names: list[str]) -> None:
        dtypes = {t.dtype for t in group.values()}
        if len(dtypes) > 1:
            raise StepCaptureError(
                f"{', '.join(names)} share storage and have different dtypes "
                f"({', '.join(sorted(map(str, dtypes)))}), which a compiled graph does not "
                'support. Clone them, or pass fallback="split".'
            )
        start = min(int(t.storage_offset()) for t in group.values())
        end = max(map(_end, group.values()))
        first = next(iter(group.values())).detach()
        for key, t in group.items():
            offset = int(t.storage_offset()) - start
            self.views[key] = View(len(self.bases), offset, tuple(t.shape), t.stride())
        self.bases.append(first.as_strided((end - start,), (1,), start))
        self.names.append(f"storage of {', '.join(names)}")

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the tensors still share the same memory."""
        for (slot, is_gradient), address in self._addresses:
            tensor = tensors[slot].grad if is_gradient else tensors[slot]
            if tensor is None or _address(tensor) != address:
                return False
        return True


def _address(tensor: Tensor) -> int:
    return int(handle_of(tensor).data_ptr())


def _end(tensor: Tensor) -> int:
    extents = ((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + sum(extents) + 1


def overlapping(tensors: Mapping[Key, Tensor]) -> Iterator[list[Key]]:
    """Groups of tensors whose parts of a storage overlap; a tensor may be there twice."""
    storages: dict[int, list[Key]] = {}
    for key, tensor in tensors.items():
        storage = storage_id(tensor) if tensor.layout is torch.strided else None
        if storage is not None and tensor.numel():
            storages.setdefault(storage, []).append(key)
    for keys in storages.values():
        group: list[Key] = []
        end = 0
        for key in sorted(keys, key=lambda key: _bytes(tensors[key])):
            first, last = _bytes(tensors[key])
            if group and first >= end:
                yield from [sorted(group)] if len(group) > 1 else []
                group = []
            group.append(key)
            end = max(end, last) if len(group) > 1 else last
        yield from [sorted(group)] if len(group) > 1 else []


def _bytes(tensor: Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    return int(tensor.storage_offset()) * size, _end(tensor) * size
