"""Cuts a graph in two: some of its calls, as a function that runs first, and the rest."""

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.roles import Input


def calls_first(
    graph: Graph, reads: Iterable[fx.Node], calls: Iterable[fx.Node], made: Iterable[fx.Node]
) -> Callable[..., Sequence[Tensor]]:
    """A function of some of a graph's calls.

    Args:
        graph: The graph; not changed.
        reads: Placeholders, whose values it takes.
        calls: What it runs, in order.
        made: Among both, whose values it returns.
    """
    copied = fx.Graph()
    copies = {node: copied.placeholder(node.name) for node in reads}
    for node in calls:
        copies[node] = copied.node_copy(node, copies.__getitem__)
    copied.output(tuple(copies[n] for n in made))
    return fx.GraphModule(graph.module, copied).forward


def without_calls(
    graph: Graph, calls: Collection[fx.Node], inputs: Sequence[tuple[fx.Node, Input]]
) -> Graph:
    """A graph without some of its calls.

    Args:
        graph: The graph; not changed.
        calls: Which are left out.
        inputs: Of the new graph: placeholders, and left out calls that others read.
    """
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, _ in inputs:
        copies[node] = copied.placeholder(node.name)
        copies[node].meta = node.meta
    for node in graph.calls:
        if node not in calls:
            copies[node] = copied.node_copy(node, copies.__getitem__)
    copied.output(fx.map_arg(graph.module.graph.output_node().args[0], copies.__getitem__))
    module = fx.GraphModule(graph.module, copied)
    return Graph(module, graph.kind, tuple(role for _, role in inputs))
