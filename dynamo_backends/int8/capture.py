"""Finds the inputs of a captured graph among batches of the model's inputs."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.inputs import inspect_captured
from dynamo_backends.int8.calibration import Arguments
from dynamo_backends.int8.options import Int8Options
from dynamo_backends.int8.proven import Batch, ProvenGraph
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.report import GraphReport

Around = Callable[[Callable[..., Any], Sequence[GraphReport]], Callable[..., Any]]
"""From a compiled graph and its reports to what proves it before it serves."""


def make_proof_wrapper(
    options: Options, captured: fx.GraphModule, example_inputs: Sequence[Any]
) -> Around | None:
    """Returns a wrapper that calibrates and checks an int8 graph; None: it is not int8.

    To be called inside a backend that Dynamo calls.

    Args:
        options: Options of the backend.
        captured: Dynamo's graph.
        example_inputs: Its inputs.

    Raises:
        OptionError: A batch of calibration lacks an argument.
        CompileError: No batches are for this graph, or for its sizes.
    """
    if not isinstance(options, Int8Options) or not options.is_int8:
        return None
    batches = placed(options, captured, example_inputs)

    def around(compiled: Callable[..., Any], reports: Sequence[GraphReport]) -> Callable[..., Any]:
        if any(report.reverted for report in reports):
            return compiled  # in eager: there is nothing to prove, and batches are not called
        return ProvenGraph(compiled, captured, batches, options, reports)

    return around


def placed(
    options: Int8Options, captured: fx.GraphModule, example_inputs: Sequence[Any]
) -> list[Batch]:
    """Returns the batches as inputs of a graph (see `Calibration.placed`)."""
    assert options.calibration is not None
    static = private.captured_static_inputs(captured)
    if any(not isinstance(x, Tensor) for x in example_inputs):
        raise CompileError(
            "precision='int8' is calibrated for static shapes, but this graph has symbolic sizes "
            "or Python scalars as inputs; compile with dynamic=False"
        )
    kinds = {x.device.type for x in example_inputs if x.ndim} - {"cpu"}
    if kinds:
        raise CompileError(
            f"precision='int8' runs on CPUs only, but an input is on {min(kinds)}; move the model "
            "and its inputs to the CPU"
        )
    facts = inspect_captured(captured)
    names = ["" if i in static else x.name for i, x in enumerate(facts.inputs)]
    return options.calibration.placed(
        names, example_inputs, Arguments(*private.captured_argument_names())
    )
