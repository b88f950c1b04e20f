"""Outputs that share memory in eager share it here too.

AOT Autograd restores outputs that are views of inputs. Outputs that are views of each other are
left to the compiled graph, but a backend returns every output in memory of its own. So where two
outputs come from one tensor through view operators, the backend returns that tensor, and torch
makes the views of it.
"""

import operator

from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph

REPLAYED = "replayed_view"


def is_replayed(node: fx.Node) -> bool:
    """Whether a node is a view of another output, to be made by torch."""
    return REPLAYED in node.meta


def separate_output_views(graph: Graph) -> int:
    """Makes outputs that share memory views of one output; their nodes get `meta[REPLAYED]`.

    Requires: normal form. Ensures: normal form; same values.

    Returns:
        How many outputs are now replayed views.
    """
    roots = [_root(x) if isinstance(x, fx.Node) else None for x in graph.outputs]
    shared = [
        i
        for i, root in enumerate(roots)
        if root is not None
        and root.op == "call_function"
        and root is not graph.outputs[i]
        and sum(other is root for other in roots) > 1
    ]
    if not shared:
        return 0
    fx_graph = graph.module.graph
    output = fx_graph.output_node()
    results = list(graph.outputs)
    with fx_graph.inserting_before(output):
        for i in shared:
            results[i] = _replay(fx_graph, results[i], roots[i])
    output.args = (tuple(results),)
    fx_graph.eliminate_dead_code()
    graph.module.recompile()
    return len(shared)


def _base(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of; None if it has memory of its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, fx.Node) and _base(source) is not None else None
    if isinstance(node.target, OpOverload) and node.target.is_view:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def _root(node: fx.Node) -> fx.Node:
    base = _base(node)
    while base is not None:
        node = base
        base = _base(node)
    return node


def _replay(graph: fx.Graph, node: fx.Node, root: fx.Node | None) -> fx.Node:
    if node is root:
        return node
    base = _base(node)
    assert base is not None
    source = _replay(graph, base, root)
    copy = graph.node_copy(node, lambda n: source if n is base else n)
    copy.meta[REPLAYED] = True
    return copy
