"""Calls operators in eager where strides differ from those of torch's fake kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import copy_graph

aten = torch.ops.aten


def call_in_eager(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator in eager; group norms tolerate inputs that are not contiguous."""
    return _TOLERANT.get(target, target)(*args, **kwargs)


def make_eager_module(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a module whose calls tolerate other strides than the traced ones."""
    if not any(node.target in _TOLERANT for node in module.graph.nodes):
        return module
    graph = copy_graph(module.graph)
    for node in graph.nodes:
        node.target = _TOLERANT.get(node.target, node.target)
    return fx.GraphModule(module, graph)


def group_norm(*args: Any, **kwargs: Any) -> Any:
    """Calls `aten.native_group_norm`, again on contiguous copies if it refuses the strides."""
    return _with_contiguous(aten.native_group_norm.default, args, kwargs)


def group_norm_backward(*args: Any, **kwargs: Any) -> Any:
    """Calls group norm's backward, again on contiguous copies if it refuses the strides."""
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
