"""What dtype a number gives a result, while a tensor of 0 dimensions stands for it.

A Python number adapts to whatever it meets; a numpy scalar adapts to tensors and outweighs Python
numbers (NEP 50); a tensor outweighs both, also one of 0 dimensions. Tensors that stand for numbers
are all of 0 dimensions, of float64 for Python numbers, so that they keep their precision.
"""

import enum
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor


class Rank(enum.IntEnum):
    """What a tensor of a trace stands for; the higher decides on dtypes."""

    PYTHON = 0
    NUMPY = 1
    TENSOR = 2


def rank_of(value: Any) -> Rank:
    """Of a number among a step's inputs."""
    return Rank.NUMPY if isinstance(value, numpy.generic) else Rank.PYTHON


def dtype_of(value: Any) -> torch.dtype:
    """Of the tensor that stands for it."""
    if not isinstance(value, numpy.floating):
        return torch.float64
    return {2: torch.float16, 4: torch.float32}.get(value.dtype.itemsize, torch.float64)


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """What numbers that meet these tensors are cast to; None if torch promotes as for numbers."""
    if any(t.ndim and t.dtype.is_floating_point | t.dtype.is_complex for t in tensors):
        return None
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.get_default_dtype()
    return dtype.to_real()
