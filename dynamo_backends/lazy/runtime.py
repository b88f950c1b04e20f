"""Runs graphs on Lazy Tensor Core: compiled once, or recorded at every call."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import disable_current_modes, has_conj_or_neg_bit
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.aliasing import is_view
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.partition import extract_callable, without_calls
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.lazy.lowering import DEVICE, record, start, to_lazy_device
from dynamo_backends.runtime.prepared_executables import make_input_merger
from dynamo_backends.runtime.results import Results


# To Lazy Tensor Core a view is a copy, also one of a weight: the transposed weight of each linear
# layer would be copied at every call. Its program takes inputs with any strides instead.
def with_views_first(graph: Graph) -> tuple[Graph, Callable[..., Sequence[Tensor]] | None]:
    """Splits off views of inputs, which run before the recorded program.

    Views that are outputs stay.

    Args:
        graph: With static shapes; not changed.

    Returns:
        What remains, and a function from the inputs of the graph to those of that; None if the
        graph has no such views.
    """
    views = _views(graph)
    if not views:
        return graph, None
    inside = set(views)
    reads = [n for n in (*graph.placeholders, *views) if any(u not in inside for u in n.users)]
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    inputs = [(n, roles.get(n, Input(n.name, Role.INTERMEDIATE))) for n in reads]
    rest = without_calls(graph, inside, inputs)
    return rest, extract_callable(graph, graph.placeholders, views, reads)


def _views(graph: Graph) -> list[fx.Node]:
    """Returns the views of inputs, in order; each after what it is a view of."""
    roots = set(graph.placeholders)
    output = graph.module.graph.output_node()
    found = []
    for node in graph.calls:
        of_inputs = is_view(node) and roots.issuperset(node.all_input_nodes)
        if of_inputs and output not in node.users and _is_strided(node.meta["val"]):
            roots.add(node)
            found.append(node)
    return found


def _is_strided(value: Any) -> bool:
    """Returns whether a view says by strides alone what it is of its base."""
    return isinstance(value, Tensor) and not has_conj_or_neg_bit(value)


log = logging.getLogger("dynamo_backends")


class Recorded:
    """A program that was recorded once and is run without lazy tensors.

    Args:
        graph: With static shapes.
    """

    def __init__(self, graph: Graph):
        self._graph, self._views = with_views_first(graph)
        self._lock = fork_safe_lock()
        self._recorded = record(self._graph)

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """Runs it on all inputs of the graph."""
        recorded = self._recorded
        inputs = values if self._views is None else self._views(*values)
        try:
            return recorded(*inputs)
        except RuntimeError as error:
            if "hash" not in str(error):
                raise
        with self._lock:  # Lazy Tensor Core keeps a limited number of programs
            if self._recorded is recorded:
                log.debug("Lazy Tensor Core evicted a program from its cache; it is traced again")
                self._recorded = record(self._graph)
        return self._recorded(*inputs)


class RecordedAtEveryCall(Executable):
    """Lazy tensors as they are usually used: a graph is recorded, looked up and run at every call.

    Args:
        graph: With static shapes.
    """

    def __init__(self, graph: Graph):
        start()
        self._module = to_lazy_device(graph)
        self._merge = make_input_merger(graph)
        self._results = Results(graph)
        self._lock = fork_safe_lock()

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`: lazy tensors are copies of the weights."""
        with disable_current_modes():
            lazy = [w.detach().to(DEVICE) for w in weights]

        def run(activations: list[Tensor]) -> list[Tensor]:
            with disable_current_modes(), torch.no_grad(), self._lock:
                inputs = self._merge(lazy, [a.detach().to(DEVICE) for a in activations])
                outputs = list(self._module(*inputs))
                private.lazy_sync(outputs)
                return self._results([x.to("cpu") for x in outputs])

        return run, range(len(weights))
