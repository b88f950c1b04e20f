"""Whole training steps compiled by Inductor."""

from typing import Any

from dynamo_backends._torch_private import compile_step_with_inductor
from dynamo_backends.aot.step.programs import CopyingProgram, StepProgram
from dynamo_backends.graph.graph import Graph


def compile_step_graph(graph: Graph) -> StepProgram:
    """A step as one program of Inductor's."""
    inputs: list[Any] = [p.meta["val"] for p in graph.placeholders]
    return CopyingProgram(graph, compile_step_with_inductor(graph.module, inputs))
