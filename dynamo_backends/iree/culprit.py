"""Finds the call at which IREE's compiler breaks down, although it compiled each call alone."""

import operator
from collections.abc import Callable, Sequence

from torch import fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.partition import extract


def culprit(graph: Graph, breaks: Callable[[Graph], bool]) -> fx.Node:
    """The last call of the shortest beginning of a graph at which the compiler breaks down.

    Takes as many compilations as the number of calls has binary digits.

    Args:
        graph: The compiler breaks down at it.
        breaks: Whether it does at a part of the graph.
    """
    calls = [n for n in graph.calls if n.target is not operator.getitem]
    fits, too_long = 0, len(calls)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if breaks(_part(graph, calls[:middle])):
            too_long = middle
        else:
            fits = middle
    return calls[too_long - 1]


def _part(graph: Graph, calls: Sequence[fx.Node]) -> Graph:
    """Calls of a graph as a graph of its own, with what picks their results."""
    inside = set(calls)
    nodes = [
        n
        for n in graph.calls
        if n in inside or (n.target is operator.getitem and n.args[0] in inside)
    ]
    return extract(graph, nodes, on_backend=True).graph
