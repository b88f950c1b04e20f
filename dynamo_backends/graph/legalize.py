"""Rewrites a graph for lowering: explicit casts, and dimensions in memory order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import (
    MemoryLayout,
    empty_strided_like,
    infer_input_layout,
    infer_layout,
)
from dynamo_backends.graph.symbolic_sizes import SIZES

aten = torch.ops.aten


def insert_promotion_casts(module: fx.GraphModule) -> None:
    """Inserts `prims.convert_element_type` casts in place where torch promotes types."""
    mode = private.FakeTensorMode()
    fakes = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor):
            with mode:
                value = empty_strided_like(value)
        fakes.append(value)
    private.promote_types(module, fakes, mode)


def copy_with_promotion_casts(graph: Graph) -> fx.GraphModule:
    """Copies a graph's module with type promotion as `aten._to_copy` casts."""
    module = graph.copy().module
    insert_promotion_casts(module)
    for node in module.graph.nodes:
        if node.target is torch.ops.prims.convert_element_type.default:
            source, *rest = node.args
            dtype = rest[0] if rest else node.kwargs["dtype"]
            node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}
            if isinstance(source, fx.Node) and SIZES in source.meta:
                node.meta[SIZES] = source.meta[SIZES]
    return module


def insert_layout_permutes(module: fx.Graph, graph: Graph) -> None:
    """Inserts permutes in place, so that activations and outputs are row-major.

    Afterwards all inputs but weights, and all outputs, are row-major, in the order of dimensions
    that `layouts.Importer` and `layouts.Exporter` have for them.

    Args:
        module: The graph to change, from `copy_with_promotion_casts`.
        graph: Where it comes from.
    """
    weights = {graph.placeholders[i].name for i in graph.weights}
    first = next(n for n in module.nodes if n.op != "placeholder")
    for node in [n for n in module.nodes if n.op == "placeholder"]:
        value = node.meta["val"]
        if isinstance(value, Tensor) and node.name not in weights:
            storage = infer_input_layout(value)
            if not storage.is_row_major:
                _store_input(module, node, first, storage)
    output = module.output_node()
    output.args = (tuple(_stored_output(module, output, n) for n in _results(output)),)


def _results(output: fx.Node) -> Sequence[fx.Node]:
    results: Any = output.args[0]
    return results


def _store_input(module: fx.Graph, node: fx.Node, first: fx.Node, storage: MemoryLayout) -> None:
    value = node.meta["val"]
    with module.inserting_before(first):
        logical = module.call_function(aten.permute.default, (node, storage.inverse_order))
    node.replace_all_uses_with(logical, delete_user_cb=lambda user: user is not logical)
    logical.meta = {k: node.meta[k] for k in ("val", SIZES) if k in node.meta}
    node.meta["val"] = value.permute(storage.order)
    _permute_sizes(node, node, storage.order)


def _stored_output(module: fx.Graph, output: fx.Node, node: fx.Node) -> fx.Node:
    storage = infer_layout(node.meta["val"])
    with module.inserting_before(output):
        for dim in storage.expanded:
            value, sizes = node.meta["val"], node.meta.get(SIZES)
            node = module.call_function(aten.slice.Tensor, (node, dim, 0, 1))
            node.meta["val"] = value.narrow(dim, 0, 1)
            if sizes is not None:
                node.meta[SIZES] = (*sizes[:dim], 1, *sizes[dim + 1 :])
        if storage.is_row_major:
            return node
        source = node
        node = module.call_function(aten.permute.default, (source, list(storage.order)))
        node.meta["val"] = source.meta["val"].permute(storage.order)
        _permute_sizes(source, node, storage.order)
        return node


def _permute_sizes(source: fx.Node, node: fx.Node, order: Sequence[int]) -> None:
    if (sizes := source.meta.get(SIZES)) is not None:
        node.meta[SIZES] = tuple(sizes[dim] for dim in order)
