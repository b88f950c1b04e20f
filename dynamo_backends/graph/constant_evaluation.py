"""Computes calls that depend on no input of their graph, such as `arange`."""

from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, disable_current_modes
from dynamo_backends.graph.random_draws import is_random

LARGEST = 1 << 20
"""Elements of the largest tensor that is computed to be known."""

_KEY = "known_value"


def evaluate_constant(node: fx.Node) -> Tensor | None:
    """Computes, and caches in `meta`, a call that reads no input; None if it cannot.

    Args:
        node: Of a graph with static shapes.

    Returns:
        None if the value depends on an input or on chance, is no single tensor, or is large, or if
        its size depends on data.
    """
    if _KEY not in node.meta:
        node.meta[_KEY] = _evaluate(node)
    value: Tensor | None = node.meta[_KEY]
    return value


def _evaluate(node: fx.Node) -> Tensor | None:
    fake = node.meta.get("val")
    if node.op != "call_function" or not isinstance(fake, Tensor) or fake.device.type != "cpu":
        return None
    count = fake.numel()
    if not isinstance(count, int) or count > LARGEST:  # else it depends on data
        return None
    if not isinstance(node.target, OpOverload) or is_random(node):
        return None
    values = {source: evaluate_constant(source) for source in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    with disable_current_modes(), torch.no_grad():
        result: Any = node.target(*args, **kwargs)
    return result
