"""Computes what depends on weights alone when weights are bound, instead of at every call.

For backends that read weights where they are and fold no constants.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, disable_current_modes
from dynamo_backends.backend import Bound, Executable
from dynamo_backends.graph.graph import Graph, Input, Role


def with_prologue(graph: Graph, make: Callable[[Graph], Executable]) -> Executable:
    """An executable of a graph whose calls on weights alone run when weights are bound.

    Views of weights cost nothing and stay where they are.

    Args:
        graph: The graph; not changed.
        make: Makes the executable of what remains.
    """
    early = _early(graph)
    return _WithPrologue(graph, early, make) if early else make(graph)


def _early(graph: Graph) -> list[fx.Node]:
    """The calls of the prologue, in order."""
    places = graph.placeholders
    known = {places[i] for i in graph.weights}
    for node in graph.calls:
        if node.all_input_nodes and all(n in known for n in node.all_input_nodes):
            known.add(node)
    needed: set[fx.Node] = set()
    for node in reversed(graph.calls):
        if node in known and (node in needed or not _is_view(node)):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [node for node in graph.calls if node in needed]


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


class _WithPrologue(Executable):
    def __init__(self, graph: Graph, early: Sequence[fx.Node], make: Callable[[Graph], Executable]):
        places = graph.placeholders
        position = {places[i]: k for k, i in enumerate(graph.weights)}
        inside = set(early)
        reads = list(dict.fromkeys(n for e in early for n in e.all_input_nodes if n in position))
        made = [e for e in early if any(u not in inside for u in e.users)]
        self._copied = [position[n] for n in reads]
        self._prologue = _prologue(graph, reads, early, made)
        direct = [n for n in position if any(u not in inside for u in n.users)]
        self._direct = [position[n] for n in direct]
        self._main = make(_main(graph, inside, direct, made))

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        with disable_current_modes(), torch.no_grad():
            made = self._prologue(*[weights[i].detach() for i in self._copied])
        given = [weights[i] for i in self._direct]
        bound, copied = self._main.bind([*given, *made])
        theirs = {self._direct[i] for i in copied if i < len(given)}
        return bound, sorted(theirs.union(self._copied))


def _prologue(
    graph: Graph, reads: Sequence[fx.Node], early: Sequence[fx.Node], made: Sequence[fx.Node]
) -> Callable[..., Sequence[Tensor]]:
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: copied.placeholder(node.name) for node in reads}
    for node in early:
        copies[node] = copied.node_copy(node, copies.__getitem__)
    copied.output(tuple(copies[n] for n in made))
    return fx.GraphModule(graph.module, copied)


def _main(
    graph: Graph, inside: Collection[fx.Node], direct: Sequence[fx.Node], made: Sequence[fx.Node]
) -> Graph:
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    inputs = [(n, roles[n]) for n in direct]
    inputs += [(n, Input(n.name, Role.CONSTANT, frozen=True)) for n in made]
    inputs += [(n, role) for n, role in roles.items() if not role.frozen]
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, _ in inputs:
        copies[node] = copied.placeholder(node.name)
        copies[node].meta = node.meta
    for node in graph.calls:
        if node not in inside:
            copies[node] = copied.node_copy(node, copies.__getitem__)
    copied.output(fx.map_arg(_outputs(graph), copies.__getitem__))
    module = fx.GraphModule(graph.module, copied)
    return Graph(module, graph.kind, tuple(role for _, role in inputs))


def _outputs(graph: Graph) -> Any:
    return graph.module.graph.output_node().args[0]
