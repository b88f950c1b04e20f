"""Allocates small host buffers that a runtime keeps bound for inputs and outputs.

Telling a runtime where a tensor is takes some microseconds, copying a few kilobytes takes less. A
call uses such memory alone, so that calls in several threads do not meet.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes

LIMIT = 1 << 16  # bytes

Item = TypeVar("Item")


def allocate_staging_tensors(
    items: Iterable[Item], describe: Callable[[Item], tuple[Sequence[int], torch.dtype]]
) -> tuple[list[tuple[Item, Tensor]], list[Item]]:
    """Allocates CPU tensors for items of at most 64 KiB; returns these and the rest.

    Args:
        items: The inputs or outputs.
        describe: Shape, in the order of memory, and dtype of one.

    Returns:
        The small ones, each with memory of its own; and the others.
    """
    small, large = [], []
    for item in items:
        shape, dtype = describe(item)
        if math.prod(shape) * dtype.itemsize > LIMIT:
            large.append(item)
            continue
        # Calls may be made in other modes than the one that the memory is made in.
        with torch.inference_mode(False), disable_current_modes():
            small.append((item, torch.empty(shape, dtype=dtype, device="cpu")))
    return small, large
