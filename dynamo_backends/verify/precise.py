"""Graphs in float64: the reference that tells an inexact result from a wrong one."""

from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import copy_graph

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a functional graph that computes every floating-point value in float64."""
    return fx.GraphModule(module, graph_in_float64(module.graph))


def graph_in_float64(graph: fx.Graph) -> fx.Graph:
    """A copy of a functional graph whose calls name float64 where they named less precise types."""
    copy = copy_graph(graph)
    for node in copy.nodes:
        if node.op in ("call_function", "call_method"):
            node.args = _map_dtypes(node.args)
            node.kwargs = _map_dtypes(node.kwargs)
    return copy


def widen(value: Any) -> Any:
    """A tensor in the precision of the reference; anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in _WIDER:
        return value.to(_WIDER[value.dtype])
    return value


def _map_dtypes(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, list | tuple):
        return type(value)(map(_map_dtypes, value))
    if isinstance(value, dict):
        return {k: _map_dtypes(v) for k, v in value.items()}
    return value
