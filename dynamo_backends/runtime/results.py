"""Restores eager's strides in results of compiled graphs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph


class Results:
    """Copies results whose strides differ from those that the graph promises.

    Args:
        graph: With static shapes.
    """

    def __init__(self, graph: Graph):
        values = [x.meta["val"] if isinstance(x, fx.Node) else x for x in graph.outputs]
        self._strides = [v.stride() if isinstance(v, Tensor) else None for v in values]

    def __call__(self, results: Sequence[Any]) -> list[Any]:
        """Returns the results; those with other strides are copied."""
        return [
            r if s is None or r.stride() == s else restride(r, s)
            for r, s in zip(results, self._strides, strict=True)
        ]


def restride(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns the tensor with given strides; copies only if the layout differs.

    Args:
        tensor: Tensor of any shape.
        strides: One per dimension. A stride of 0 says that memory holds the dimension only once,
            so all elements along it must be equal.
    """
    matters = [
        n > 1 and given != s
        for n, given, s in zip(tensor.shape, tensor.stride(), strides, strict=True)
    ]
    if not tensor.numel() or not any(matters):
        return tensor.as_strided(tensor.shape, strides)
    once = tuple(
        slice(0, 1) if n > 1 and not s else slice(None)
        for n, s in zip(tensor.shape, strides, strict=True)
    )
    source = tensor[once]
    copy = source.new_empty_strided(source.shape, strides).copy_(source)
    return copy.as_strided(tensor.shape, strides)
