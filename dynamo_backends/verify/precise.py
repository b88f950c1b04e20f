"""Graphs in float64: the reference that tells an inexact result from a wrong one.

The reference rounds where every kernel does, so it has the value that a program has in its own
types: `(x + c) - c` is what the addition leaves of `x`, and a cast to float16 and back is computed.
"""

from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import copy_graph
from dynamo_backends.verify.rounding import CASTS, is_rounded_once

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a functional graph that computes every floating-point value in float64.

    What is rounded once by every kernel is rounded here, too.
    """
    return fx.GraphModule(module, graph_in_float64(module.graph))


def graph_in_float64(graph: fx.Graph) -> fx.Graph:
    """A copy of a functional graph whose calls name float64 where they named less precise types."""
    copy = copy_graph(graph)
    for node in list(copy.nodes):
        if node.op in ("call_function", "call_method"):
            node.args = _map_dtypes(node.args)
            node.kwargs = _map_dtypes(node.kwargs)
            dtype = _dtype_of_rounding(node)
            if dtype is not None:
                with copy.inserting_after(node):
                    rounded = copy.call_function(round_to, (node, dtype))
                rounded.meta = dict(node.meta)
                node.replace_all_uses_with(rounded, lambda user, own=rounded: user is not own)
    return copy


def round_to(value: Any, dtype: torch.dtype) -> Any:
    """A value in float64 as a less precise type has it."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.float64, torch.complex128):
        return value
    return value.to(dtype).to(value.dtype)


def _dtype_of_rounding(node: fx.Node) -> torch.dtype | None:
    """The type to which every kernel rounds what a call computes; None: kernels differ.

    Those that compute several operators in float16 or bfloat16 may round only the last one.
    """
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, Tensor) or value.dtype not in _WIDER:
        return None
    if node.target in CASTS:
        return value.dtype
    return value.dtype if is_rounded_once(node) and value.dtype.itemsize >= 4 else None


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
