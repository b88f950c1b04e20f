"""Compiles a graph: convert it to an OpenVINO model and make an executable of that."""

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.openvino.decoder import plain
from dynamo_backends.openvino.lowering import lower
from dynamo_backends.openvino.runtime import OpenVinoExecutable
from dynamo_backends.openvino.session import Settings


def compile_graph(graph: Graph, settings: Settings) -> OpenVinoExecutable:
    """Compiles a graph of supported calls.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: OpenVINO refuses the model.
    """
    lowered = lower(graph)
    try:
        return OpenVinoExecutable(graph, lowered, settings)
    except Exception as error:
        raise CompileError(f"OpenVINO cannot compile the model: {plain(error)}") from error
