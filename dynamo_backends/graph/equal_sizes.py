"""Sizes that are equal because an operator takes no others, and that torch takes for two.

torch's shape functions of most operators insist on what has to be equal, which makes one symbol of
two. Those of fused attention do not look at the length of the values. So the keys and the values of
a growing cache have symbols of their own, which no call tells apart: each length would be looked at
anew, and compiled anew where a decomposition insists.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_KEYS_AND_VALUES = (((1, 0), (2, 0)), ((1, 2), (2, 2)))
"""Batch and length: a position among the arguments, and a dimension, of both."""

EQUAL: Mapping[Any, Sequence[tuple[tuple[int, int], tuple[int, int]]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _KEYS_AND_VALUES,
    aten._scaled_dot_product_flash_attention.default: _KEYS_AND_VALUES,
    aten._scaled_dot_product_efficient_attention.default: _KEYS_AND_VALUES,
}


def unite_equal_sizes(graph: fx.Graph) -> None:
    """Tells torch which symbols of a graph are equal, while Dynamo captures what it is of.

    Dynamo guards that they are in each call; others are captured anew, and refused as in eager.

    Args:
        graph: Just traced by AOT Autograd: symbols know their values in the call.
    """
    for node in graph.nodes:
        for (a, i), (b, j) in EQUAL.get(node.target, ()):
            first, second = _value(node, a), _value(node, b)
            if first is not None and second is not None:
                _unite(first.shape[i], second.shape[j])


def _value(node: fx.Node, place: int) -> Tensor | None:
    source = node.args[place] if place < len(node.args) else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return value if isinstance(value, Tensor) and value.ndim == 4 else None


def _unite(first: int | torch.SymInt, second: int | torch.SymInt) -> None:
    symbolic = [n for n in (first, second) if isinstance(n, torch.SymInt)]
    if symbolic and all(n.node.has_hint() for n in symbolic):
        bool(first == second)  # which torch guards, and learns from
