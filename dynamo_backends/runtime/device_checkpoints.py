"""Tensors of a device in checkpoints of torch.distributed.checkpoint.

A tensor of which each process has a part is written in these parts, each by a process that has it;
any other is written whole. A tensor is read whole, by each process.
"""

from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dynamo_backends.runtime.device_values import fills_storage, on_host, value_of


def part_of(handle: Tensor) -> tuple[tuple[int, ...], Tensor] | None:
    """Where this process's part of a tensor begins, and its contents; None: it has all of it."""
    value = value_of(handle)
    if value is None or value.array is None or value.on_host:
        return None
    if not (fills_storage(handle) and handle.is_contiguous()):
        return None
    return value.home.part_of(value.array) if value.array.shape == tuple(handle.shape) else None


def write_items(handle: Tensor, name: str) -> tuple[list[Any], bool]:
    """What this process has to write; of several that have the same, one does.

    Args:
        handle: Of a tensor that is to be written.
        name: In the checkpoint.

    Returns:
        The items, and whether it is this process's part alone.
    """
    found = part_of(handle)
    if found is None:
        on_host(handle)  # where it has to be gathered for that, all processes are here
    offsets, part = ((0,) * handle.dim(), handle) if found is None else found
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(Size(offsets), part.shape),
        properties=TensorProperties.create_from_tensor(part),
        size=handle.shape,
    )
    kind = WriteItemType.TENSOR if found is None else WriteItemType.SHARD
    index = MetadataIndex(name, Size(offsets))
    return [WriteItem(index=index, type=kind, tensor_data=data)], found is not None


def chunks(handle: Tensor) -> list[Any]:
    """What this process has to read: all of it."""
    return [ChunkStorageMetadata(Size((0,) * handle.dim()), handle.shape)]
