"""Extrema and absolute values of narrow integers, which Inductor's loops for CPUs get wrong.

Inductor of torch 2.13: the extremum of a row of 8-bit integers is that of the row and 0, and the
absolute value of the least number of 8 or 16 bits does not overflow before it is cast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.decompose import replace

aten = torch.ops.aten

_EXTREMA = (
    aten.amin.default, aten.amax.default, aten.min.default, aten.max.default, aten.min.dim,
    aten.max.dim, aten.argmin.default, aten.argmax.default, aten.aminmax.default,
)  # fmt: skip


def _in_int32(operator: Any) -> Callable[..., Any]:
    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = operator(x.to(torch.int32), *args, **kwargs)
        if isinstance(result, Tensor):
            return _narrowed(result, x.dtype)
        return tuple(_narrowed(each, x.dtype) for each in result)

    return compute


def _narrowed(result: Tensor, dtype: torch.dtype) -> Tensor:
    return result.to(dtype) if result.dtype == torch.int32 else result  # positions are of 64 bits


def _abs(x: Tensor) -> Tensor:
    return torch.maximum(x, torch.neg(x))


_WAYS = {
    **{operator: ((torch.int8, torch.uint8), _in_int32(operator)) for operator in _EXTREMA},
    aten.abs.default: ((torch.int8, torch.int16), _abs),
}
"""For each operator the dtypes, and a function that computes it of these."""


def widen_narrow_integers(graph: fx.Graph) -> None:
    """Replaces the calls that Inductor gets wrong, in place.

    Args:
        graph: Functional, with fake tensors.
    """
    for node in list(graph.nodes):
        dtypes, function = _WAYS.get(node.target, ((), None))
        if function is not None and node.args[0].meta["val"].dtype in dtypes:
            replace(node, function)


def narrow_integer_rules(
    table: dict[Any, Callable[..., Any]],
) -> dict[Any, Callable[..., Any]]:
    """Returns the same as rules for tracing.

    Args:
        table: Rules for other dtypes, by the operator.
    """
    return {operator: _rule(operator, table.get(operator)) for operator in _WAYS}


def _rule(operator: Any, otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    dtypes, function = _WAYS[operator]

    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype in dtypes:
            return function(x, *args, **kwargs)
        return NotImplemented if otherwise is None else otherwise(x, *args, **kwargs)

    return compute
