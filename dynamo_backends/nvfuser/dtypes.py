"""Maps torch's element types and memory orders to nvFuser's."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_backends.nvfuser.program import Input

NAMES = {
    torch.bool: "Bool",
    torch.int32: "Int32",
    torch.int64: "Int",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
}
"""Names in nvFuser's `DataType`, of the types that fusions compute with.

It has complex types as well, which are left to eager.
"""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a value is computed: float32 for half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def constant_kind(dtype: torch.dtype) -> str:
    """Returns the name of the type of a number that fills a tensor of `dtype`: Python's own."""
    if dtype.is_floating_point:
        return "Double"
    return "Bool" if dtype == torch.bool else "Int"


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
