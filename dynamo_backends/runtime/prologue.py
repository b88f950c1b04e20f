"""Computes what depends on weights alone when weights are bound, instead of at every call.

For backends that read weights where they are and fold no constants.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.graph.aliasing import is_view
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.partition import calls_first, without_calls
from dynamo_backends.graph.sizes import sizes_in
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.report import GraphReport


def with_prologue(graph: Graph, make: Callable[[Graph], Executable]) -> Executable:
    """Returns an executable of a graph whose calls on weights alone run when weights are bound.

    Views of weights cost nothing and stay where they are.

    Args:
        graph: The graph; not changed.
        make: Makes the executable of what remains.
    """
    prologue = Prologue(graph)
    return _WithPrologue(prologue, make(prologue.rest)) if prologue.is_needed else make(graph)


class Prologue:
    """The calls of a graph on weights alone.

    Args:
        graph: The graph; not changed.

    Attributes:
        is_needed: There are such calls.
        rest: The graph without them, whose weights are some of the graph's and what they make.
    """

    def __init__(self, graph: Graph):
        early = _early(graph)
        places = graph.placeholders
        position = {places[i]: k for k, i in enumerate(graph.weights)}
        inside = set(early)
        reads = list(dict.fromkeys(n for e in early for n in e.all_input_nodes if n in position))
        made = [e for e in early if any(u not in inside for u in e.users)]
        direct = [n for n in position if any(u not in inside for u in n.users)]
        self.is_needed = bool(early)
        self._copied = [position[n] for n in reads]
        self._direct = [position[n] for n in direct] if early else list(position.values())
        self._run = calls_first(graph, reads, early, made) if early else None
        rest = without_calls(graph, inside, _inputs(graph, direct, made)) if early else graph
        self.rest = rest

    def __call__(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Returns the weights of `rest`.

        Args:
            weights: Of the graph.
        """
        made: Sequence[Tensor] = ()
        if self._run is not None:
            with disable_current_modes(), torch.no_grad():
                made = self._run(*[weights[i].detach() for i in self._copied])
        return [*(weights[i] for i in self._direct), *made]

    def copied(self, copied: Collection[int]) -> list[int]:
        """Positions of the graph's weights whose contents were copied, if those of `rest` were."""
        theirs = {self._direct[i] for i in copied if i < len(self._direct)}
        return sorted(theirs.union(self._copied))


def _early(graph: Graph) -> list[fx.Node]:
    """Returns the calls of the prologue, in order."""
    places = graph.placeholders
    known = {places[i] for i in graph.weights}
    for node in graph.calls:
        sources = node.all_input_nodes
        if sources and known.issuperset(sources) and not sizes_in((node.args, node.kwargs)):
            known.add(node)
    needed: set[fx.Node] = set()
    for node in reversed(graph.calls):
        if node in known and (node in needed or not is_view(node)):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [node for node in graph.calls if node in needed]


class _WithPrologue(Executable):
    def __init__(self, prologue: Prologue, rest: Executable):
        self._prologue = prologue
        self._rest = rest
        self.serves_range = rest.serves_range

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        bound, copied = self._rest.bind(self._prologue(weights))
        return bound, self._prologue.copied(copied)

    def report_to(self, report: GraphReport) -> None:
        """See `Executable.report_to`."""
        self._rest.report_to(report)


def _inputs(
    graph: Graph, direct: Sequence[fx.Node], made: Sequence[fx.Node]
) -> list[tuple[fx.Node, Input]]:
    """Returns those of the rest: weights, what the prologue makes, and what is no weight."""
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    inputs = [(n, roles[n]) for n in direct]
    inputs += [(n, Input(n.name, Role.CONSTANT, frozen=True)) for n in made]
    return inputs + [(n, role) for n, role in roles.items() if not role.frozen]
