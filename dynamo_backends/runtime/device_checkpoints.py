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

from dynamo_backends.runtime.device_tensor import DeviceTensor
from dynamo_backends.runtime.device_values import fills_storage, value_of


def part_of(tensor: DeviceTensor) -> tuple[tuple[int, ...], Tensor] | None:
    """Where this process's part of a tensor begins, and its contents; None: it has all of it."""
    handle = tensor._handle
    value = value_of(handle)
    if value is None or value.array is None or value.on_host:
        return None
    if not (fills_storage(handle) and handle.is_contiguous()):
        return None
    return value.home.part_of(value.array) if value.array.shape == tuple(handle.shape) else None


def write_items(tensor: DeviceTensor, name: str) -> list[Any]:
    """What this process has to write; of several that have the same, one does.

    Args:
        tensor: To be written.
        name: In the checkpoint.
    """
    found = part_of(tensor)
    if found is None:
        tensor.host()  # where it has to be gathered for that, all processes are here
    offsets, part = ((0,) * tensor.dim(), tensor) if found is None else found
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(Size(offsets), part.shape),
        properties=TensorProperties.create_from_tensor(part),
        size=tensor.shape,
    )
    tensor._is_in_parts = found is not None
    index = MetadataIndex(name, Size(offsets))
    kind = WriteItemType.TENSOR if found is None else WriteItemType.SHARD
    return [WriteItem(index=index, type=kind, tensor_data=data)]


def chunks(tensor: DeviceTensor) -> list[Any]:
    """What this process has to read: all of it."""
    tensor._is_in_parts = False
    return [ChunkStorageMetadata(Size((0,) * tensor.dim()), tensor.shape)]


def shard(tensor: DeviceTensor) -> Tensor:
    """What was announced last, by `write_items` or by `chunks`."""
    found = part_of(tensor) if tensor._is_in_parts else None
    return tensor if found is None else found[1]
