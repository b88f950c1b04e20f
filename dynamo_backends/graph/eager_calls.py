"""Calls as eager computes them where strides are not those that torch's fake kernels promised."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import copy_graph

aten = torch.ops.aten


def compute(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator in eager."""
    return _TOLERANT.get(target, target)(*args, **kwargs)


def for_eager(module: fx.GraphModule) -> fx.GraphModule:
    """A module that computes a graph in eager; the module itself where that is enough."""
    if not any(node.target in _TOLERANT for node in module.graph.nodes):
        return module
    graph = copy_graph(module.graph)
    for node in graph.nodes:
        node.target = _TOLERANT.get(node.target, node.target)
    return fx.GraphModule(module, graph)


def group_norm(*args: Any, **kwargs: Any) -> Any:
    """Computes `aten.native_group_norm` in eager."""
    return _with_contiguous(aten.native_group_norm.default, args, kwargs)


def group_norm_backward(*args: Any, **kwargs: Any) -> Any:
    """Computes `aten.native_group_norm_backward` in eager."""
    return _with_contiguous(aten.native_group_norm_backward.default, args, kwargs)


def _with_contiguous(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator whose kernel checks that tensors are contiguous.

    What comes before it in a graph may have other strides than it was traced with: torch's fake
    kernels are not always right about them.
    """
    try:
        return operator(*args, **kwargs)
    except RuntimeError as error:
        if "is_contiguous" not in str(error):
            raise
        return operator(*(x.contiguous() if isinstance(x, Tensor) else x for x in args), **kwargs)


_TOLERANT: dict[Any, Callable[..., Any]] = {
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
}
