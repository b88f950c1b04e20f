"""Compiles a graph: lower it to ONNX and make an executable of the model."""

import onnx_ir as ir

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.onnx.lowering import lower
from dynamo_backends.ort.runtime import ModelNames, OrtExecutable
from dynamo_backends.ort.session import SessionSettings, plain


def compile_graph(graph: Graph, settings: SessionSettings) -> OrtExecutable:
    """Compiles a graph of supported calls.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: ONNX Runtime refuses the model.
    """
    lowered = lower(graph)
    model = ir.to_proto(lowered.model).SerializeToString()
    try:
        return OrtExecutable(graph, model, ModelNames(lowered.inputs, lowered.outputs), settings)
    except Exception as error:
        raise CompileError(f"ONNX Runtime cannot load the model: {plain(error)}") from error
