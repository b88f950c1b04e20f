"""Compiles a graph: lower it to ONNX and make an executable of the model."""

import json
from collections.abc import Mapping

import onnx_ir as ir

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError, as_compile_error
from dynamo_backends.onnx.lowering import lower
from dynamo_backends.ort.ranged import RangedOrtExecutable
from dynamo_backends.ort.runtime import ModelNames, OrtExecutable
from dynamo_backends.ort.session import SessionSettings, plain
from dynamo_backends.runtime.ranged import for_range


def compile_graph(graph: Graph, settings: SessionSettings) -> OrtExecutable:
    """Compiles a graph of supported calls.

    Args:
        graph: For concrete shapes. Where these come from symbolic ones, one model serves a range.
        settings: Of its sessions.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: ONNX Runtime refuses the model.
    """
    return for_range(
        graph, lambda ranged: _compile(graph, settings, ranged and not settings.graphs)
    )


def _compile(graph: Graph, settings: SessionSettings, ranged: bool) -> OrtExecutable:
    lowered = lower(graph, ranged)
    model = ir.to_proto(lowered.model).SerializeToString()
    names = ModelNames(lowered.inputs, lowered.outputs)
    with as_compile_error("ONNX Runtime cannot load the model", plain):
        return _kind(ranged)(graph, model, names, settings)


def load(parts: Mapping[str, bytes], graph: Graph, settings: SessionSettings) -> OrtExecutable:
    """Recreates an executable from `OrtExecutable.dump`.

    Raises:
        CompileError: The parts are incomplete, or ONNX Runtime refuses them.
    """
    try:
        kept = json.loads(parts["wiring"])
        wiring = ModelNames(tuple(kept["inputs"]), tuple(kept["outputs"]))
        executable = _kind(kept["ranged"])(graph, parts["model"], wiring, settings)
        if (len(wiring.inputs), len(wiring.outputs)) != (len(graph.inputs), len(graph.outputs)):
            raise ValueError("it is of another graph")
        return executable
    except Exception as error:
        raise CompileError(f"the cached ONNX model cannot be used: {error}") from error


def _kind(ranged: bool) -> type[OrtExecutable]:
    return RangedOrtExecutable if ranged else OrtExecutable
