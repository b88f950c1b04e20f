"""Compiles a graph: find a program that serves it, or lower it to ONNX and build one."""

import dataclasses
from collections.abc import Callable

from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import drop_size_expressions, has_size_expressions
from dynamo_backends.interface.errors import CompileError, LoweringError
from dynamo_backends.interface.executable import Executable
from dynamo_backends.onnx.lowering import lower_to_onnx
from dynamo_backends.runtime.prepared_executables import Prologue
from dynamo_backends.trt.engine_builder import Profile, Settings, build, profile, serialize
from dynamo_backends.trt.precision import DTYPES, reduce_precision
from dynamo_backends.trt.program import Plan, SharedEngine
from dynamo_backends.trt.runtime import TensorRTExecutable, owned_weights
from dynamo_backends.trt.store import PROGRAMS, BeyondProfileError, Names
from dynamo_backends.trt.vendor import log


def compile_graph(graph: Graph, settings: Settings) -> Executable:
    """Compiles a graph of supported calls.

    What depends on weights alone is computed by torch when weights are bound, so that every weight
    of the engine is one that it can be given anew.

    Args:
        graph: For concrete shapes. Where these come from symbolic ones, one engine serves a range.
        settings: What engines depend on.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: TensorRT refuses the model.
    """
    reduced = DTYPES.get(settings.options.precision)
    if reduced is not None and settings.options.strongly_typed:
        graph = reduce_precision(graph, reduced)
    prologue = Prologue(graph)
    graph = prologue.rest
    if has_size_expressions(graph.module.graph):
        try:
            found = _find(graph, settings, ranged=True)
            return TensorRTExecutable(graph, *found, prologue)
        except BeyondProfileError:
            raise
        except (LoweringError, CompileError) as error:
            # A lowering or TensorRT has to know a size: every shape gets an engine of its own.
            log.info("one engine cannot serve a range of shapes: %s", error)
    found = _find(_static(graph), settings, ranged=False)
    return TensorRTExecutable(graph, *found, prologue)


def _find(graph: Graph, settings: Settings, ranged: bool) -> tuple[SharedEngine, bool]:
    """Returns a program for a graph, and whether it came from disk just now."""
    written = engine_graph(graph)

    def profile_for(names: Names) -> Profile:
        return profile(written, names, settings.options.max_size)

    def make(adjust: Callable[[Profile], Profile]) -> Plan:
        lowered = lower_to_onnx(written, ranged)
        model = serialize(lowered.model)
        wanted = adjust(profile_for(lowered.inputs))
        return Plan(build(model, wanted, settings), model, lowered.inputs, lowered.outputs, wanted)

    return PROGRAMS.find(fingerprint(written, ranged), profile_for, settings, make)


def engine_graph(graph: Graph) -> Graph:
    """Returns a graph in which only refittable weights are frozen; others are inputs."""
    owned = owned_weights(graph)
    inputs = [
        dataclasses.replace(x, frozen=x.frozen and i in owned) for i, x in enumerate(graph.inputs)
    ]
    return Graph(graph.module, graph.kind, tuple(inputs))


def _static(graph: Graph) -> Graph:
    """Returns a copy that has forgotten where its sizes come from."""
    copy = graph.copy()
    drop_size_expressions(copy.module.graph)
    return copy
