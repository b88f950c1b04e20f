"""Lets convolutions before batch norm, and grouped attention heads, read torch's own weights.

Folding a batch norm makes a scaled copy of the convolution's weight, half of all weights of a
ResNet-50. A 1×1 convolution is a matrix product here, and XLA multiplies by the scale for nothing
when it adds the bias. So these are scaled afterwards: their weights are neither copied nor watched.
"""

import functools
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph, eliminate_dead_calls
from dynamo_backends.graph.shape_propagation import ShapeInference

aten = torch.ops.aten


def move_scale_after_conv(graph: Graph) -> bool:
    """Rewrites conv(x, w * scale, shift) to conv(x, w) * scale + shift, in place.

    Only where w is a frozen weight with one tap, and scale has one number per output channel.

    Returns:
        Whether there was any.
    """
    frozen = {p for p, x in zip(graph.placeholders, graph.inputs, strict=True) if x.frozen}
    changed, infer = False, ShapeInference()
    for conv in graph.calls:
        if conv.target is not aten.convolution.default:
            continue
        found = _scaled(conv, frozen)
        if found is not None:
            _replace(graph.module.graph, conv, *found, infer)
            changed = True
    if changed:
        eliminate_dead_calls(graph.module.graph)
    return changed


def _scaled(conv: fx.Node, frozen: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Weight and scale of a convolution that can be scaled late."""
    product = conv.args[1]
    transposed, groups = conv.args[6], conv.args[8]
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor or transposed:
        return None
    weight, scale = product.args
    if weight not in frozen or not isinstance(weight, fx.Node) or not isinstance(scale, fx.Node):
        return None
    shape, factor = weight.meta["val"].shape, scale.meta["val"].shape
    alike = product.meta["val"].dtype == weight.meta["val"].dtype == conv.meta["val"].dtype
    per_channel = tuple(factor) == (shape[0], *[1] * (len(shape) - 1))
    if groups != 1 or not alike or not per_channel or any(n != 1 for n in shape[2:]):
        return None
    return weight, scale


def _replace(
    graph: fx.Graph, conv: fx.Node, weight: fx.Node, scale: fx.Node, infer: ShapeInference
) -> None:
    x, _, shift, *geometry = conv.args
    channels = weight.meta["val"].shape[0]
    spread = [channels, *[1] * (weight.meta["val"].ndim - 2)]

    call = functools.partial(infer.insert_call, graph)
    with graph.inserting_before(conv):
        plain = graph.call_function(aten.convolution.default, (x, weight, None, *geometry))
        plain.meta = dict(conv.meta)
        result = call(aten.mul.Tensor, plain, call(aten.view.default, scale, spread))
        if shift is not None:
            result = call(aten.add.Tensor, result, call(aten.view.default, shift, spread))
    conv.replace_all_uses_with(result)
    graph.erase_node(conv)


_REPETITION = (
    (aten._unsafe_view.default, aten.view.default, aten.reshape.default),
    (aten.clone.default,),
    (aten.expand.default,),
    (aten.unsqueeze.default,),
)
"""The last call first."""


def undo_repeated_kv_heads(graph: Graph) -> None:
    """Rewrites attention on repeated K/V heads to grouped-query attention, in place."""
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
        eliminate_dead_calls(graph.module.graph)
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
