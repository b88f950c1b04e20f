"""Inductor for graphs that a backend would run in fragments (`Options.fragmented`).

This is no backend that users name: they have `torch.compile(backend="inductor")` for that.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, compile_with_inductor
from dynamo_backends.backend import SUPPORTED, Availability, Backend, Bound, Executable, Support
from dynamo_backends.graph.graph import Graph
from dynamo_backends.toolkit.preparation import in_order
from dynamo_backends.toolkit.results import Results


class InductorBlocks(Backend):
    """Compiles functional ATen graphs with Inductor."""

    name = "inductor"
    summary = "torch's own compiler, for graphs that fell into fragments"

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        return Availability(True, "part of torch")

    def supports(self, node: fx.Node, options: Any) -> Support:
        """See `Backend.supports`. Inductor itself leaves to eager what it has no lowering for."""
        if isinstance(node.target, OpOverload):
            return SUPPORTED
        return Support(False, "it is not an ATen operator")

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        inputs = [p.meta["val"] for p in graph.placeholders]
        run = compile_with_inductor(graph.module, inputs)
        return _Compiled(graph, run)


class _Compiled(Executable):
    """A block compiled by Inductor, which reads all weights where they are."""

    def __init__(self, graph: Graph, run: Any):
        self._merge = in_order(graph)
        self._run = run
        self._results = Results(graph)

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, tuple[int, ...]]:
        """See `Executable.bind`."""

        def run(activations: list[Tensor]) -> list[Tensor]:
            return self._results(self._run(*self._merge(weights, activations)))

        return run, ()
