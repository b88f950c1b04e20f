"""Compiles whole training steps: the inputs that a step updates are donated to XLA."""

from typing import Any

import jax

from dynamo_backends.errors import CompileError, LoweringError
from dynamo_backends.graph.graph import Graph
from dynamo_backends.toolkit.layouts import Exporter, Importer
from dynamo_backends.toolkit.memory import return_free_memory
from dynamo_backends.xla import _jaxlib, prologue
from dynamo_backends.xla.compiler import abstract, from_storage, to_storage
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from dynamo_backends.xla.runtime import Device
from dynamo_backends.xla.step_runtime import XlaStep
from dynamo_backends.xla.transposes import fold_transposes


def compile_step(graph: Graph, device: Device, options: LoweringOptions) -> XlaStep:
    """Compiles a graph of the kind "step" for the CPU.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: XLA refuses the program.
    """
    donated = tuple(i for i, x in enumerate(graph.inputs) if x.updated_by is not None)
    with jax.enable_x64(True):
        program = fold_transposes(_trace(graph, options))
        executable = _compile(program, device, donated)
    return_free_memory()
    return XlaStep(device, graph, executable)


def _trace(graph: Graph, options: LoweringOptions) -> Any:
    values = [p.meta["val"] for p in graph.placeholders]
    storages = [Importer(v).storage for v in values]
    # What is updated keeps its layout; the updates are the first outputs, in the inputs' order.
    results = [s for s, x in zip(storages, graph.inputs, strict=True) if x.updated_by is not None]
    results += [Exporter(n.meta["val"]).storage for n in graph.outputs[len(results) :]]
    lowering = GraphLowering(graph.module.graph, options)

    def program(*arrays: jax.Array) -> list[jax.Array]:
        inputs = [from_storage(a, s) for a, s in zip(arrays, storages, strict=True)]
        outputs = lowering(inputs)
        return [to_storage(r, s) for r, s in zip(outputs, results, strict=True)]

    try:
        return jax.make_jaxpr(program)(*map(abstract, values, storages))
    except LoweringError:
        raise
    except Exception as error:
        raise CompileError(f"jax cannot trace the step: {error}") from error


def _compile(program: Any, device: Device, donated: tuple[int, ...]) -> Any:
    try:
        function = jax.jit(prologue.as_function(program), donate_argnums=donated, keep_unused=True)
        traced = function.trace(*prologue.avals(program))
        lowered = traced.lower(lowering_platforms=(device.platform,))
        return _jaxlib.compile_program(device.client, device.handle, _jaxlib.bytecode(lowered))
    except Exception as error:
        raise CompileError(f"XLA cannot compile the step: {error}") from error
