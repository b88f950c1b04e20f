"""Arguments in the memory layout that the model was exported with."""

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor


class Layout:
    """The strides that one argument has to have: the graph may depend on them.

    Args:
        like: The fake tensor of the exported graph.
    """

    def __init__(self, like: Tensor):
        self._strides = list(map(_expression, like.stride()))
        self._is_row_major = like.is_contiguous()

    @property
    def symbols(self) -> set[Any]:
        """What the strides depend on."""
        return {s for x in self._strides if not isinstance(x, int) for s in x.free_symbols}

    def __call__(self, value: Tensor, sizes: Mapping[sympy.Expr, Any]) -> Tensor:
        """The argument, or a copy that has those strides.

        Args:
            value: The argument.
            sizes: The values of symbols in this call.
        """
        wanted = row_major(value.shape) if self._is_row_major else self._evaluated(sizes)
        if value.stride() == wanted:
            return value
        if self._is_row_major and value.is_contiguous():  # but for the strides of sizes of 1
            return value.as_strided(value.shape, wanted)
        made = torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device)
        return made.copy_(value)

    def _evaluated(self, sizes: Mapping[sympy.Expr, Any]) -> tuple[int, ...]:
        return tuple(x if isinstance(x, int) else int(x.xreplace(sizes)) for x in self._strides)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives a new tensor of a shape."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _expression(stride: Any) -> Any:
    return stride.node.expr if isinstance(stride, torch.SymInt) else int(stride)
