"""Reduced precision as part of the graph: operands of products and convolutions are rounded.

A strongly typed network computes in the types that the graph has. So the graph says what autocast
would: products and convolutions of float32 tensors read float16 or bfloat16 and give float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.precision import PRODUCTS
from dynamo_backends.graph.symbolic_sizes import SIZES

aten = torch.ops.aten

_REDUCED = PRODUCTS | {aten.scaled_dot_product_attention.default}

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def reduce_precision(graph: Graph, dtype: torch.dtype) -> Graph:
    """Returns a copy of a graph in which products and convolutions of float32 read another type.

    Args:
        graph: In normal form.
        dtype: `torch.float16` or `torch.bfloat16`.
    """
    copy = graph.copy()
    rounded: dict[fx.Node, fx.Node] = {}
    for node in copy.calls:
        if node.target in _REDUCED and _is_float32(node):
            _reduce(node, dtype, rounded)
    copy.module.recompile()
    return copy


def _reduce(node: fx.Node, dtype: torch.dtype, rounded: dict[fx.Node, fx.Node]) -> None:
    for source in [n for n in node.all_input_nodes if _is_float32(n)]:
        if source not in rounded:
            with node.graph.inserting_before(node):
                rounded[source] = _cast(node.graph, source, dtype)
        node.replace_input_with(source, rounded[source])
    with node.graph.inserting_after(node):
        result = _cast(node.graph, node, torch.float32)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
    node.meta = {**node.meta, "val": node.meta["val"].to(dtype)}


def _cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    node = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    node.meta = {k: v for k, v in source.meta.items() if k == SIZES}
    node.meta["val"] = source.meta["val"].to(dtype)
    return node


def _is_float32(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.float32


def flags(package: Any, precision: str, strongly_typed: bool) -> Sequence[Any]:
    """Returns the builder flags of a precision, besides `TF32`.

    Args:
        package: `tensorrt`.
        precision: As in `TensorRTOptions`.
        strongly_typed: As in `TensorRTOptions`; such networks have none of these flags.
    """
    names = {"fp16": "FP16", "bf16": "BF16"}
    if strongly_typed or precision not in names:
        return ()
    return (getattr(package.BuilderFlag, names[precision]),)
