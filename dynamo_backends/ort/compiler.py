"""Compiles a graph: lower it to ONNX and make an executable of the model."""

import json
import logging
from collections.abc import Callable, Mapping

import onnx_ir as ir
from torch import fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.sizes import is_ranged
from dynamo_backends.interface.errors import CompileError, LoweringError
from dynamo_backends.onnx.lowering import lower
from dynamo_backends.ort.ranged import RangedOrtExecutable
from dynamo_backends.ort.runtime import ModelNames, OrtExecutable
from dynamo_backends.ort.session import SessionSettings, plain

log = logging.getLogger("dynamo_backends")

Expanded = Callable[[fx.Node], bool]


def compile_graph(graph: Graph, settings: SessionSettings, expanded: Expanded) -> OrtExecutable:
    """Compiles a graph of supported calls.

    Args:
        graph: For concrete shapes. Where these come from symbolic ones, one model serves a range.
        settings: Of its sessions.
        expanded: Which calls are decomposed before they are lowered.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: ONNX Runtime refuses the model.
    """
    if is_ranged(graph.module.graph) and not settings.graphs:
        try:
            return _compile(graph, settings, expanded, ranged=True)
        except (LoweringError, CompileError) as error:
            # A lowering has to know a size: every shape gets a model of its own.
            log.info("one model cannot serve a range of shapes: %s", error)
    return _compile(graph, settings, expanded, ranged=False)


def _compile(
    graph: Graph, settings: SessionSettings, expanded: Expanded, ranged: bool
) -> OrtExecutable:
    lowered = lower(graph, expanded, ranged)
    model = ir.to_proto(lowered.model).SerializeToString()
    names = ModelNames(lowered.inputs, lowered.outputs)
    try:
        return _kind(ranged)(graph, model, names, settings)
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"ONNX Runtime cannot load the model: {plain(error)}") from error


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
