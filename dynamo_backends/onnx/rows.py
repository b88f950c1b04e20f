"""Writes to rows of a tensor, in a form that copies it once.

The exporter's lowering of `index_put` writes to leading dimensions only: it transposes a cache, and
transposes the result back.
"""

from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.decompose import ORIGIN, origin

aten = torch.ops.aten


def scatter_rows(module: fx.GraphModule) -> None:
    """Replaces `index_put` with one index of one dimension by `scatter`; sizes are known."""
    for node in module.graph.find_nodes(op="call_function", target=aten.index_put.default):
        dim = _dimension(node)
        if dim is not None:
            _replace(module.graph, node, dim)


def _dimension(node: fx.Node) -> int | None:
    """The dimension, behind the first, whose rows a call writes; None: it is not such a call."""
    arguments: Any = node.args
    self, indices, rows, *accumulate = arguments
    found = [d for d, index in enumerate(indices) if index is not None]
    if len(found) != 1 or not found[0] or any(accumulate) or node.kwargs:
        return None
    (dim,) = found
    index = indices[dim].meta["val"]
    whole = list(self.meta["val"].shape)
    whole[dim : dim + 1] = index.shape
    is_whole = list(rows.meta["val"].shape) == whole
    return dim if is_whole and index.ndim == 1 and index.dtype == torch.int64 else None


def _replace(graph: fx.Graph, node: fx.Node, dim: int) -> None:
    arguments: Any = node.args
    self, indices, rows, *_ = arguments
    shape = list(rows.meta["val"].shape)
    behind = [-1, *[1] * (len(shape) - dim - 1)]
    with graph.inserting_before(node):
        index = _call(graph, node, aten.view.default, indices[dim], behind)
        index = _call(graph, node, aten.expand.default, index, shape)
        result = _call(graph, node, aten.scatter.src, self, dim, index, rows)
    result.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _call(graph: fx.Graph, of: fx.Node, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = of.meta["val"].fake_mode if hasattr(of.meta["val"], "fake_mode") else FakeTensorMode()
    with mode:
        node.meta["val"] = target(*values)
    node.meta[ORIGIN] = origin(of)
    return node
