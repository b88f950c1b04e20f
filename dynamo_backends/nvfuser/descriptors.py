"""How nvFuser is told of a tensor's memory.

The rules are those of nvFuser's `compute_tensor_descriptor` (python_common/python_utils.h): the
order of dimensions in memory is that of their strides; dimensions of stride 0 stay where they are;
a dimension is contiguous if its stride is the extent of the next one inside that is not broadcast.
"""

from collections.abc import Sequence

from torch import Tensor

from dynamo_backends.nvfuser.dtypes import NAMES
from dynamo_backends.nvfuser.program import Input


def describe(value: Tensor) -> Input:
    """Returns the definition of a (fake) tensor with static sizes and strides."""
    order = memory_order(value.shape, value.stride())
    return Input(
        tuple(1 if size == 1 else -1 for size in value.shape),
        _contiguity(value, order),
        NAMES[value.dtype],
        stride_order(order),
    )


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Returns the dimensions, outermost in memory first."""
    order = sorted((d for d in range(len(sizes)) if strides[d]), key=lambda d: -strides[d])
    for d in range(len(sizes)):
        if not strides[d]:
            order.insert(d, d)
    return order


def stride_order(order: Sequence[int]) -> tuple[int, ...]:
    """nvFuser's spelling of an order of dimensions: how many lie inside of each."""
    inside = {d: len(order) - 1 - place for place, d in enumerate(order)}
    return tuple(inside[d] for d in range(len(order)))


def _contiguity(value: Tensor, order: Sequence[int]) -> tuple[bool | None, ...]:
    flags: list[bool | None] = []
    expected = 1
    for d in reversed(order):
        if value.shape[d] == 1 or not value.stride(d):
            flags.append(None)
        else:
            flags.append(value.stride(d) == expected)
            expected = value.stride(d) * value.shape[d]
    return tuple(reversed(flags))
