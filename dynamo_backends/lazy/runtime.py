"""Runs graphs on Lazy Tensor Core: compiled once, or recorded at every call."""

import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.backend import Bound, Executable
from dynamo_backends.lazy.lowering import DEVICE, on_lazy, record, start
from dynamo_backends.lazy.views import with_views_first
from dynamo_backends.runtime.preparation import in_order
from dynamo_backends.runtime.results import Results

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
                log.debug("Lazy Tensor Core has dropped a program; it is recorded again")
                self._recorded = record(self._graph)
        return self._recorded(*inputs)


class RecordedAtEveryCall(Executable):
    """Lazy tensors as they are usually used: a graph is recorded, looked up and run at every call.

    Args:
        graph: With static shapes.
    """

    def __init__(self, graph: Graph):
        start()
        self._module = on_lazy(graph)
        self._merge = in_order(graph)
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
