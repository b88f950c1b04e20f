"""The backends `ltc` and `ltc_trace`: torch's Lazy Tensor Core on its TorchScript backend."""

from typing import Any

import torch
from torch import fx

from dynamo_backends.graph.call_arguments import dynamic_shape_reason
from dynamo_backends.graph.graph import Graph, require_cpu_inputs
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.plan import SUPPORTED, Support
from dynamo_backends.runtime.prepared_executables import UnfrozenExecutable, with_prologue

# Lazy tensors have no strides.
_STRIDED = frozenset({"aten::as_strided", "aten::as_strided_scatter", "aten::as_strided_copy"})


class LazyTensorCore(Backend):
    """Records a graph once, and runs the compiled program without recording it again."""

    name = "ltc"
    summary = "Lazy Tensor Core, traced and compiled once per graph"

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        if not hasattr(torch._C, "_lazy_ts_backend"):
            reason = f"torch {torch.__version__} was built without Lazy Tensor Core"
            return Availability(False, reason, "pip install --force-reinstall torch")
        return Availability(True, "Lazy Tensor Core's TorchScript backend", devices=("cpu",))

    def check_graph(self, graph: Graph, options: Any) -> None:
        """See `Backend.check_graph`."""
        require_cpu_inputs(graph, self.name)

    def supports(self, node: fx.Node, options: Any) -> Support:
        """See `Backend.supports`."""
        from dynamo_backends.lazy.lowering import why_not

        target: Any = node.target
        if target._schema.name in _STRIDED:
            return Support(
                False, "it depends on the strides of its input, and lazy tensors have no strides"
            )
        shape = dynamic_shape_reason(node)
        if shape is not None:
            return Support(False, shape)
        reason = why_not(node)
        return SUPPORTED if reason is None else Support(False, reason)

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        from dynamo_backends.lazy.runtime import Recorded

        return with_prologue(graph, lambda rest: UnfrozenExecutable(rest, Recorded(rest)))


class LazyTensorCoreTrace(LazyTensorCore):
    """Records a graph at every call: the usual way of lazy tensors, for comparison."""

    name = "ltc_trace"
    same_as = "ltc"
    summary = "Lazy Tensor Core, traced at every call; a baseline for ltc"

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        from dynamo_backends.lazy.runtime import RecordedAtEveryCall

        return with_prologue(graph, RecordedAtEveryCall)
