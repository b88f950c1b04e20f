"""Executables that read weights where they are, or compile them in.

A weight that is compiled in costs a compilation whenever it changes. That is worth it for weights
that stay; those that keep changing (see `binding`) are ordinary inputs of one program that needs no
compilation any more.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes, is_lazy
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import computed
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.runtime.ranged import RangedCalls
from dynamo_backends.runtime.results import Results

Run = Callable[..., Sequence[Any]]
"""From tensors, as positional arguments, to results."""


def computing(run: Run, is_lazy: Callable[[Any], bool] = is_lazy) -> Run:
    """A program that reads memory as it is, given copies of inputs that are not what lies there.

    Args:
        run: The program.
        is_lazy: Which inputs it would misread; all lazy conjugates by default.
    """
    return lambda *inputs: run(*(computed(x) if is_lazy(x) else x for x in inputs))


def in_order(graph: Graph) -> Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]:
    """Returns a function from weights and activations to a graph's inputs, in the graph's order."""
    places = (*graph.weights, *graph.activations)
    order = sorted(range(len(places)), key=places.__getitem__)

    def merge(weights: Sequence[Tensor], activations: Sequence[Tensor]) -> list[Tensor]:
        values = (*weights, *activations)
        return [values[i] for i in order]

    return merge


class LiveExecutable(Executable):
    """An executable that prepares nothing: it reads weights where they are.

    Args:
        graph: With static shapes.
        run: Takes all inputs of the graph, in its order.
        calls: How `run` is called where it takes the sizes of each call, too.
    """

    def __init__(self, graph: Graph, run: Run, calls: RangedCalls | None = None):
        self.run = run
        self.serves_range = calls is not None
        self._calls = calls
        self._merge = in_order(graph)
        self._results = Results(graph)

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`: nothing is copied."""
        weights = [w.detach() for w in weights]
        run, merge, results = self.run, self._merge, self._results
        if self._calls is not None:
            return self._calls.around(run, functools.partial(merge, weights)), ()
        return lambda activations: results(run(*merge(weights, activations))), ()


class PreparedExecutable(Executable):
    """An executable that compiles weights in. A graph without weights is compiled at once.

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
        self._live: LiveExecutable | None = None
        self._fixed: Bound | None = None
        if not graph.weights:
            with disable_current_modes():  # constants would be folded into fake tensors
                self._fixed = self._bound(self.prepare(()))

    @abstractmethod
    def prepare(self, weights: Sequence[Tensor]) -> Run:
        """Compiles weights in, all or none; the function takes the other inputs of the graph."""

    def prepare_live(self) -> Run:
        """Returns the function that takes all inputs of the graph, in its order."""
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
            self._live = self._live or LiveExecutable(self.graph, self.prepare_live(), self._calls)
        return self._live.bind(weights)

    def _bound(self, run: Run) -> Bound:
        if self._calls is not None:
            return self._calls.around(run)
        results = self._results
        return lambda activations: results(run(*activations))
