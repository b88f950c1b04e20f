"""Compiles a graph: convert it to an OpenVINO model and make an executable of that."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import distinct_varying_sizes
from dynamo_backends.interface.errors import CompileError, reraise_as_compile_error
from dynamo_backends.openvino.core_api import CompileSettings, deserialize_model, import_compiled
from dynamo_backends.openvino.frontend import summarize_error
from dynamo_backends.openvino.lowering import LoweredOpenVino, lower_to_model
from dynamo_backends.openvino.ranged import RangedOpenVinoExecutable, preserves_nonempty
from dynamo_backends.openvino.runtime import OpenVinoExecutable
from dynamo_backends.runtime.ranged_calls import make_for_range, require_nonempty


def compile_graph(graph: Graph, settings: CompileSettings, wide: bool = True) -> OpenVinoExecutable:
    """Lowers a graph to an OpenVINO model and compiles it.

    Args:
        graph: For concrete shapes. Where these come from symbolic ones, one model serves a range.
        settings: How it is compiled.
        wide: See `lowering.lower_to_model`.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: OpenVINO refuses the model.
    """
    return make_for_range(graph, lambda ranged: _compile(graph, settings, ranged, wide))


def _compile(
    graph: Graph, settings: CompileSettings, ranged: bool, wide: bool
) -> OpenVinoExecutable:
    if ranged:
        _require_dynamic(settings)
        # A kernel of OpenVINO divides by zero else, which ends the process.
        require_nonempty(graph, preserves_nonempty)
        _require_own_types(graph)
    lowered = lower_to_model(graph, ranged, wide)
    with reraise_as_compile_error("OpenVINO cannot compile the model", summarize_error):
        return _kind(ranged)(graph, lowered, settings)


def _require_dynamic(settings: CompileSettings) -> None:
    if not settings.device.startswith("CPU"):
        raise CompileError(f"the OpenVINO device {settings.device} supports static shapes only")


def _require_own_types(graph: Graph) -> None:
    values = [node.meta["val"] for node in (*graph.placeholders, *graph.outputs)]
    if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in values):
        raise CompileError("inputs and outputs of float64 are supported for static shapes only")


def load_executable(
    parts: Mapping[str, bytes], graph: Graph, settings: CompileSettings
) -> OpenVinoExecutable:
    """Makes an executable from the parts of `OpenVinoExecutable.dump`.

    Raises:
        CompileError: The parts are incomplete, or OpenVINO refuses them.
    """
    try:
        wiring = json.loads(parts["inputs"])
        places, ranged = tuple(wiring["places"]), wiring["ranged"]
        if len(places) != len(graph.inputs) + (len(distinct_varying_sizes(graph)) if ranged else 0):
            raise ValueError("it was compiled for another graph")
        if "compiled" in parts:
            compiled = import_compiled(parts["compiled"], settings)
            return _kind(ranged)(graph, LoweredOpenVino(None, places), settings, compiled)
        model = deserialize_model(parts["model"], parts["constants"])
        return _kind(ranged)(graph, LoweredOpenVino(model, places), settings)
    except Exception as error:
        raise CompileError(f"the cached OpenVINO model cannot be used: {error}") from error


def _kind(ranged: bool) -> type[OpenVinoExecutable]:
    return RangedOpenVinoExecutable if ranged else OpenVinoExecutable
