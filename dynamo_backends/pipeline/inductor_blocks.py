"""Inductor for graphs that a backend would run in fragments (`Options.fragmented`).

This is no backend that users name: they have `torch.compile(backend="inductor")` for that.
"""

from typing import Any

from torch import fx

from dynamo_backends._torch_private import compile_with_inductor
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.plan import SUPPORTED, Support
from dynamo_backends.runtime.preparation import LiveExecutable


class InductorBlocks(Backend):
    """Compiles functional ATen graphs with Inductor."""

    name = "inductor"
    summary = "torch's own compiler, for graphs that fell into fragments"

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        return Availability(True, "part of torch")

    def supports(self, node: fx.Node, options: Any) -> Support:
        """See `Backend.supports`. Inductor itself leaves to eager what it has no lowering for."""
        return SUPPORTED

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        inputs = [p.meta["val"] for p in graph.placeholders]
        return LiveExecutable(graph, compile_with_inductor(graph.module, inputs))
