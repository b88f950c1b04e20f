"""Executables that compile weights in, or read them in place.

A weight that is compiled in costs a compilation whenever it changes. That is worth it for weights
that stay; those that keep changing (see `binding`) are ordinary inputs of one program that needs no
compilation any more.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import disable_current_modes, has_conj_or_neg_bit
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.aliasing import is_view
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.layouts import resolve_conj_and_neg
from dynamo_backends.graph.partition import extract_callable, without_calls
from dynamo_backends.graph.symbolic_sizes import collect_varying_sizes
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.ranged_calls import RangedCalls
from dynamo_backends.runtime.results import Results

Run = Callable[..., Sequence[Any]]
"""From tensors, as positional arguments, to results."""


def wrap_for_lazy_inputs(run: Run, is_lazy: Callable[[Any], bool] = has_conj_or_neg_bit) -> Run:
    """Wraps a program to materialize lazily conjugated or negated inputs.

    Args:
        run: The program.
        is_lazy: Which inputs it would misread; all lazy conjugates by default.
    """
    return lambda *inputs: run(*(resolve_conj_and_neg(x) if is_lazy(x) else x for x in inputs))


def make_input_merger(graph: Graph) -> Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]:
    """Returns a function that merges weights and activations in input order."""
    places = (*graph.weights, *graph.activations)
    order = sorted(range(len(places)), key=places.__getitem__)

    def merge(weights: Sequence[Tensor], activations: Sequence[Tensor]) -> list[Tensor]:
        values = (*weights, *activations)
        return [values[i] for i in order]

    return merge


class UnfrozenExecutable(Executable):
    """An executable that reads weights in place and prepares none.

    Args:
        graph: With static shapes.
        run: Takes all inputs of the graph, in its order.
        calls: How `run` is called where it takes the sizes of each call, too.
    """

    def __init__(self, graph: Graph, run: Run, calls: RangedCalls | None = None):
        self.run = run
        self.serves_range = calls is not None
        self._calls = calls
        self._merge = make_input_merger(graph)
        self._results = Results(graph)

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """Binds weights by reference; copies nothing."""
        weights = [w.detach() for w in weights]
        run, merge, results = self.run, self._merge, self._results
        if self._calls is not None:
            return self._calls.wrap_function(run, functools.partial(merge, weights)), ()
        return lambda activations: results(run(*merge(weights, activations))), ()


class PreparedExecutable(Executable):
    """An executable that compiles weights in as constants.

    Args:
        graph: With static shapes.
        calls: How functions are called that take the sizes of each call, too.
    """

    def __init__(self, graph: Graph, calls: RangedCalls | None = None):
        self.graph = graph
        self.serves_range = calls is not None
        self._calls = calls
        self._results = Results(graph)
        self._lock = fork_safe_lock()
        self._live: UnfrozenExecutable | None = None
        self._fixed: Bound | None = None
        if not graph.weights:
            with disable_current_modes():  # constants would be folded into fake tensors
                self._fixed = self._bound(self.prepare(()))

    @abstractmethod
    def prepare(self, weights: Sequence[Tensor]) -> Run:
        """Compiles with weights as constants; returns a function of the other inputs."""

    def prepare_live(self) -> Run:
        """Compiles a function of all inputs, weights included, in graph order."""
        return self.prepare(())

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        if self._fixed is not None:
            return self._fixed, ()
        with self._lock, disable_current_modes():
            run = self.prepare([w.detach() for w in weights])
        return self._bound(run), range(len(weights))

    def bind_live(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind_live`."""
        with self._lock, disable_current_modes():
            self._live = self._live or UnfrozenExecutable(
                self.graph, self.prepare_live(), self._calls
            )
        return self._live.bind(weights)

    def _bound(self, run: Run) -> Bound:
        if self._calls is not None:
            return self._calls.wrap_function(run)
        results = self._results
        return lambda activations: results(run(*activations))


def with_prologue(graph: Graph, make: Callable[[Graph], Executable]) -> Executable:
    """Moves calls on weights alone to `bind`; makes an executable of the rest.

    Views of weights cost nothing and stay where they are.

    Args:
        graph: The graph; not changed.
        make: Makes the executable of what remains.
    """
    prologue = Prologue(graph)
    return _WithPrologue(prologue, make(prologue.rest)) if prologue.is_needed else make(graph)


class Prologue:
    """Calls on weights alone (constant folding), run when weights are bound.

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
        self._run = extract_callable(graph, reads, early, made) if early else None
        rest = without_calls(graph, inside, _inputs(graph, direct, made)) if early else graph
        self.rest = rest

    def __call__(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Returns the weights of `rest`.

        Args:
            weights: Weights of the graph.
        """
        made: Sequence[Tensor] = ()
        if self._run is not None:
            with disable_current_modes(), torch.no_grad():
                made = self._run(*[weights[i].detach() for i in self._copied])
        return [*(weights[i] for i in self._direct), *made]

    def copied_positions(self, copied: Collection[int]) -> list[int]:
        """Returns positions of weights that were copied, by the prologue or by the rest."""
        theirs = {self._direct[i] for i in copied if i < len(self._direct)}
        return sorted(theirs.union(self._copied))


def _early(graph: Graph) -> list[fx.Node]:
    """Returns the calls of the prologue, in order."""
    places = graph.placeholders
    known = {places[i] for i in graph.weights}
    for node in graph.calls:
        sources = node.all_input_nodes
        if (
            sources
            and known.issuperset(sources)
            and not collect_varying_sizes((node.args, node.kwargs))
        ):
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
        return bound, self._prologue.copied_positions(copied)

    def set_report(self, report: GraphReport) -> None:
        """See `Executable.set_report`."""
        self._rest.set_report(report)


def _inputs(
    graph: Graph, direct: Sequence[fx.Node], made: Sequence[fx.Node]
) -> list[tuple[fx.Node, Input]]:
    """Returns those of the rest: weights, what the prologue makes, and what is no weight."""
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    inputs = [(n, roles[n]) for n in direct]
    inputs += [(n, Input(n.name, Role.CONSTANT, frozen=True)) for n in made]
    return inputs + [(n, role) for n, role in roles.items() if not role.frozen]
