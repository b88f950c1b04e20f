"""A graph of Dynamo's in float64."""

from collections.abc import Callable
from typing import Any

from torch import fx

from dynamo_backends._torch_private import copy_captured
from dynamo_backends.verify import in_float64

# Methods that name a dtype.
_CASTS = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble"}


def precise_captured(captured: fx.GraphModule) -> Callable[..., Any]:
    """Returns a copy of a graph of Dynamo's that computes every floating-point value in float64.

    Its inputs must be in float64, too. Where the graph casts in ways that are not seen here, its
    results are less precise, or it raises.
    """
    module = in_float64(copy_captured(captured))
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target in _CASTS:
            node.target = _CASTS[node.target]
    module.recompile()
    return module.forward
