"""Attention of groups of heads that share keys and values reads these where they are.

transformers repeats keys and values for each head of a group, which is a copy of a whole cache per
token. The lowering of attention needs no copies (`lowering.attention`).
"""

from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph, drop_dead

aten = torch.ops.aten

_REPETITION = (
    (aten._unsafe_view.default, aten.view.default, aten.reshape.default),
    (aten.clone.default,),
    (aten.expand.default,),
    (aten.unsqueeze.default,),
)
"""The last call first."""


def share_heads(graph: Graph) -> None:
    """Gives attention the keys and values that were repeated; the graph is changed."""
    changed = False
    for node in graph.calls:
        if not isinstance(node.target, OpOverload) or not _is_attention(node.target):
            continue
        query, *repeated = node.args[:3]
        shared = [_before_repetition(x) for x in repeated]
        if None not in shared and _shape(shared[0])[:3] == _shape(shared[1])[:3]:
            node.args = (query, *shared, *node.args[3:])
            changed = True
    if changed:
        drop_dead(graph.module.graph)
        graph.module.recompile()


def _is_attention(target: OpOverload) -> bool:
    name = target.name()
    return name.startswith("aten::_scaled_dot_product") and "backward" not in name


def _before_repetition(node: Any) -> fx.Node | None:
    """(B, H, S, E) of which a value (B, H * n, S, E) repeats each head n times; None: of none."""
    steps: list[fx.Node] = [node]
    for targets in _REPETITION:
        last = steps[-1]
        if not isinstance(last, fx.Node) or last.target not in targets:
            return None
        steps.append(last.args[0])  # type: ignore[arg-type]
    _, clone, _, unsqueeze, source = steps
    batch, heads, *rest = _shape(source)
    if unsqueeze.args[1] != 2 or len(rest) != 2 or len(_shape(clone)) != 5:
        return None
    times = _shape(clone)[2]
    whole = (batch, heads, times, *rest) == _shape(clone)
    return source if whole and _shape(node) == (batch, heads * times, *rest) else None


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
