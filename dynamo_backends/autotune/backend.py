"""Defines the backend `autotune`."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.plan import SUPPORTED, Support

if TYPE_CHECKING:
    from dynamo_backends.interface.executable import StepProgram


class Autotune(Backend):
    """Chooses for each graph the fastest backend whose results were verified."""

    name = "autotune"
    summary = (
        "measures candidate backends for each graph and uses the fastest one with verified results"
    )
    dynamic_shapes = "as the chosen backend"
    Options = AutotuneOptions
    is_verified = True

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        return Availability(True, "eager is always available")

    def compile_captured_graph(
        self, captured: fx.GraphModule, example_inputs: Sequence[Any], options: Any, number: int
    ) -> Callable[..., Any] | None:
        """Tunes a graph of Dynamo's: candidates compile it whole."""
        from dynamo_backends.autotune.executables import tune_captured_graph
        from dynamo_backends.autotune.tuning_subjects import CapturedGraphSubject

        split = None
        if _is_differentiated(example_inputs):
            options.refuse_gradients(self.name)
            split = ForwardBackwardAutotune()
        subject = CapturedGraphSubject(captured, example_inputs, options, number, split)
        if options.mode == "background":
            from dynamo_backends.autotune.hot_swap import tune_in_background

            return tune_in_background(subject)
        return tune_captured_graph(subject)

    def preserved_operators(self, options: Any) -> Collection[OpOverload]:
        """Returns what no candidate wants decomposed; each decomposes the rest itself."""
        from dynamo_backends.torchscript.backend import whole_operators

        return whole_operators()

    def supports(self, node: fx.Node, options: Any) -> Support:
        """Supports all calls whose shapes are known (see `Backend.supports`)."""
        from dynamo_backends.graph.call_arguments import dynamic_shape_reason

        shape = dynamic_shape_reason(node)
        return SUPPORTED if shape is None else Support(False, shape)

    def compile(self, graph: Graph, options: Any) -> Executable:
        """Compiles a functional graph, such as a backward graph; the first call tunes it."""
        from dynamo_backends.autotune.executables import TunedGraph

        return TunedGraph(graph, options)

    def compile_step(self, graph: Graph, options: Any) -> "StepProgram":
        """Compiles a training step; its first call tunes it."""
        from dynamo_backends.autotune.tuned_step import TunedStepProgram

        return TunedStepProgram(graph, options)


class ForwardBackwardAutotune(Autotune):
    """Tunes forward and backward graph separately: the candidate "split" in training."""

    def compile_captured_graph(
        self, captured: fx.GraphModule, example_inputs: Sequence[Any], options: Any, number: int
    ) -> None:
        """Returns None: the pipeline makes forward and backward graph of it."""
        return None


def _is_differentiated(inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )
