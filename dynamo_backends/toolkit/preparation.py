"""Executables that compile weights in, and stop doing so when weights keep changing.

A weight that is compiled in costs a compilation whenever it changes. That is worth it for weights
that stay; where one compilation after the other is thrown away, weights become ordinary inputs of
one program that needs no compilation any more.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.backend import Bound, Executable
from dynamo_backends.graph.graph import Graph
from dynamo_backends.toolkit.results import Results

WASTED = 3
"""So many compilations in a row that were used at most once end the compiling in of weights."""

Run = Callable[..., Sequence[Any]]
"""From tensors, as positional arguments, to results."""


def in_order(graph: Graph) -> Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]:
    """A function from weights and activations to a graph's inputs, in the graph's order."""
    places = (*graph.weights, *graph.activations)
    order = sorted(range(len(places)), key=places.__getitem__)

    def merge(weights: Sequence[Tensor], activations: Sequence[Tensor]) -> list[Tensor]:
        values = (*weights, *activations)
        return [values[i] for i in order]

    return merge


class PreparedExecutable(Executable):
    """An executable that compiles weights in. A graph without weights is compiled at once.

    Args:
        graph: With static shapes.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self._results = Results(graph)
        self._merge = in_order(graph)
        self._lock = threading.Lock()
        self._wasted = -1
        self._last: _Usage | None = None
        self._live: Run | None = None
        self._fixed: Bound | None = None
        if not graph.weights:
            with disable_current_modes():  # constants would be folded into fake tensors
                self._fixed = self._bound(self.prepare(()), _Usage())

    @abstractmethod
    def prepare(self, weights: Sequence[Tensor]) -> Run:
        """Compiles the weights in; the function takes activations."""

    @abstractmethod
    def prepare_live(self) -> Run:
        """The function that takes all inputs of the graph, in its order."""

    @property
    def is_live(self) -> bool:
        """Whether weights are ordinary inputs by now, because they kept changing."""
        return self._live is not None

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        if self._fixed is not None:
            return self._fixed, ()
        weights = [w.detach() for w in weights]
        with self._lock, disable_current_modes():
            if self._live is None and self._keeps_changing():
                self._live = self.prepare_live()
            if self._live is not None:
                return self._bind_live(self._live, weights), ()
            self._last = _Usage()
            return self._bound(self.prepare(weights), self._last), range(len(weights))

    def _keeps_changing(self) -> bool:
        unused = self._last is None or self._last.calls <= 1
        self._wasted = self._wasted + 1 if unused else 0
        return self._wasted >= WASTED

    def _bound(self, run: Run, usage: "_Usage") -> Bound:
        results = self._results

        def bound(activations: list[Tensor]) -> list[Tensor]:
            usage.calls += 1
            return results(run(*activations))

        return bound

    def _bind_live(self, run: Run, weights: Sequence[Tensor]) -> Bound:
        merge, results = self._merge, self._results
        return lambda activations: results(run(*merge(weights, activations)))


@dataclass
class _Usage:
    """How often a bound function was called."""

    calls: int = 0
