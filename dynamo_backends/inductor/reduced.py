"""Computes in bfloat16 what is faster so: `precision="bf16"`.

As under torch's autocast products and convolutions read and give bfloat16, and what loses by it,
such as normalizations, softmax and sums, is computed in float32. What follows a product and neither
gains nor loses stays in bfloat16 as long as all that it reads is, so that images and activations
take half the memory. Unlike autocast this comes after weights have been folded, and casts of frozen
weights are computed once. (`trt/precision.py` rounds the operands of the same calls; TensorRT joins
them with what follows by itself.)

torch's kernel of attention is no faster on CPUs in bfloat16 than in float32. Where the scores stay
in the cache two products and a softmax are faster than it, which is measured.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.attention_decompositions import flash_attention_for_cpu
from dynamo_backends.graph.call_decomposition import get_origin_name, replace_call
from dynamo_backends.graph.precision import PRODUCTS
from dynamo_backends.graph.shape_propagation import ShapeInference
from dynamo_backends.kernels.patterns import CAST, is_float32
from dynamo_backends.kernels.timing import fastest
from dynamo_backends.workers.race import Run

aten = torch.ops.aten

_SCORES_IN_CACHE = 1 << 17  # of a head; in bfloat16 these are 256 KiB
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_CARRIERS = {
    operator.getitem,
    aten._adaptive_avg_pool2d.default,
    aten._unsafe_view.default,
    aten.add.Tensor,
    aten.avg_pool2d.default,
    aten.cat.default,
    aten.clamp.default,
    aten.clamp_max.default,
    aten.clamp_min.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.expand.default,
    aten.flip.default,
    aten.gelu.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.max_pool2d_with_indices.default,
    aten.mean.dim,
    aten.mul.Tensor,
    aten.permute.default,
    aten.relu.default,
    aten.reshape.default,
    aten.roll.default,
    aten.select.int,
    aten.sigmoid.default,
    aten.silu.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.sub.Tensor,
    aten.t.default,
    aten.tanh.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


def compute_in_bfloat16(module: fx.GraphModule) -> bool:
    """Lets a graph compute in bfloat16, as the module's docstring says.

    Args:
        module: Functional, its calls with values. Inputs and outputs keep their types.

    Returns:
        Whether something has changed.
    """
    graph = module.graph
    changed = _multiply_attention(graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if changed:
        infer = ShapeInference()
        for node in calls:  # those that are new have values of another fake mode
            infer(node)
    if not any(_is_product(node) for node in calls):
        return changed
    types = _Types(graph)
    for node in calls:
        types.visit(node)
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = fx.map_arg(output.args, types.wide)
    module.recompile()
    return True


def _multiply_attention(graph: fx.Graph) -> bool:
    """Takes attention apart where products in bfloat16 are faster than torch's kernel."""
    changed = False
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        if _is_divisible(node) and _is_faster_in_products(node):
            call = get_origin_name(node)
            replace_call(node, flash_attention_for_cpu)
            if node.kwargs.get("attn_mask") is None:
                _trust_softmax(graph, call)
            changed = True
    return changed


def _is_divisible(node: fx.Node) -> bool:
    """Returns whether an attention reads something in float32, and gives only what inference needs.

    In causal attention the kernel saves half of the work, and products do not.
    """
    inputs = [n.meta["val"] for n in node.all_input_nodes]
    plain = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    return (
        plain
        and not any(node.args[3:])
        and is_float32(inputs[0])
        and all(x.numel() for x in inputs)
    )


def _trust_softmax(graph: fx.Graph, attention: str) -> None:
    """Without a mask each query sees a key, which torch's softmax for attention looks for."""
    for node in graph.find_nodes(op="call_function", target=aten._safe_softmax.default):
        if get_origin_name(node) == attention:
            node.target = aten._softmax.default
            node.args, node.kwargs = (*node.args[:2], False), {}


def _is_faster_in_products(node: fx.Node) -> bool:
    query, key, value = (n.meta["val"] for n in node.args[:3])  # type: ignore[union-attr]
    *batch, length, _ = query.shape

    def ways() -> dict[str, Run]:
        q, k, v = (
            torch.ones(math.prod(batch), *x.shape[-2:], dtype=torch.bfloat16)
            for x in (query, key, value)
        )
        scores = q.new_empty(len(q), length, k.shape[1])
        weights, result = torch.empty_like(scores), q.new_empty(len(q), length, v.shape[2])

        def multiply(_: list[Tensor]) -> list[Tensor]:
            torch.bmm(q, k.mT, out=scores)
            aten._softmax.out(scores, -1, False, out=weights)
            return [torch.bmm(weights, v, out=result)]

        return {
            "whole": lambda inputs: list(_ATTENTION(*inputs)),
            "products": multiply,
        }

    layouts = [(x.shape, x.contiguous().stride(), x.dtype) for x in (query, key, value)]
    safe = "products" if length * key.shape[-2] <= _SCORES_IN_CACHE else "whole"
    return fastest("attention", "whole", ways, layouts, safe=safe) == "products"


class _Types:
    """The values of a graph that are in bfloat16."""

    def __init__(self, graph: fx.Graph):
        self._graph = graph
        self._infer = ShapeInference()
        self._reduced: set[fx.Node] = set()  # these were float32
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Gives a call its arguments in the type that it is to compute in."""
        before = node.meta["val"]
        with self._graph.inserting_before(node):
            if _is_product(node):
                node.args = fx.map_arg(node.args, self._narrow)
            elif not self._carries(node):
                node.args = fx.map_arg(node.args, self.wide)
                node.kwargs = fx.map_arg(node.kwargs, self.wide)
                return
        self._infer(node)
        if is_float32(before) and not is_float32(node.meta["val"]):
            self._reduced.add(node)

    def _carries(self, node: fx.Node) -> bool:
        """Returns whether a call is to compute in bfloat16 because all that it reads is."""
        if node.target not in _CARRIERS:
            return False
        floats = [
            n for n in node.all_input_nodes
            if n in self._reduced or (is_float32(n.meta["val"]) and not _is_scalar(n.meta["val"]))
        ]  # fmt: skip
        return bool(floats) and self._reduced.issuperset(floats)

    def wide(self, node: fx.Node) -> fx.Node:
        """A value as it was before this pass."""
        return self._cast(node, torch.float32) if node in self._reduced else node

    def _narrow(self, node: fx.Node) -> fx.Node:
        return self._cast(node, torch.bfloat16) if is_float32(node.meta["val"]) else node

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        key = (node, dtype)
        if key not in self._casts:
            self._casts[key] = self._infer.insert_call(self._graph, CAST, *key)
        return self._casts[key]


def _is_product(node: fx.Node) -> bool:
    return node.target in PRODUCTS and is_float32(node.meta["val"])


def _is_scalar(value: Any) -> bool:
    """Returns whether torch's type promotion ignores a value because it has no dimensions."""
    return isinstance(value, Tensor) and value.ndim == 0
