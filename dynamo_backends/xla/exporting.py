"""StableHLO of a graph for other machines: a versioned program, lowered for a platform by name."""

from collections.abc import Sequence
from typing import Any

import dynamo_backends.xla.jax_import  # noqa: F401 - before jax

# isort: split
import jax
import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import row_major_layout, to_row_major
from dynamo_backends.interface.errors import reraise_as_compile_error
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.compiler import to_shape_dtype_struct
from dynamo_backends.xla.conv_attention_rewrites import (
    move_scale_after_conv,
    undo_repeated_kv_heads,
)
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from dynamo_backends.xla.lowering.values import to_logical_array
from dynamo_backends.xla.runtime import open_device


def portable_program(graph: Graph, options: LoweringOptions) -> bytes:
    """Exports a graph as a serialized, versioned StableHLO artifact.

    It takes the weights, then the activations, and returns the outputs, as row-major arrays in the
    tensors' own order of dimensions.

    Args:
        graph: With static shapes; it is not changed.
        options: Options of the lowering; the platform need not be here.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: jax cannot lower it.
    """
    graph = graph.copy()
    if options.platform == "cpu":
        move_scale_after_conv(graph)
    undo_repeated_kv_heads(graph)
    lowering = GraphLowering(graph.module.graph, options)
    order = [*graph.weights, *graph.activations]
    values = [p.meta["val"] for p in graph.placeholders]

    def program(*arrays: jax.Array) -> list[jax.Array]:
        inputs: list[Any] = [None] * len(order)
        for place, array in zip(order, arrays, strict=True):
            inputs[place] = array
        return [to_logical_array(value) for value in lowering(inputs)]

    with jax.enable_x64(True), reraise_as_compile_error("jax cannot lower the graph"):
        shapes = [to_shape_dtype_struct(values[i], row_major_layout(values[i].ndim)) for i in order]
        traced = jax.jit(program, keep_unused=True).trace(*shapes)
        return _jaxlib.to_portable_artifact(traced.lower(lowering_platforms=(options.platform,)))


def run_stablehlo_on_cpu(program: bytes, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Compiles a StableHLO artifact on this machine's CPU and runs it once.

    Args:
        program: From `portable_program`.
        inputs: Inputs of it, in order.
    """
    device = open_device("cpu")
    loaded = _jaxlib.compile_program(device.client, device.handle, program)
    buffers = device.import_tensors([to_row_major(t) for t in inputs])
    results = _jaxlib.make_single_device_call(loaded, device.handle)(buffers)
    return [device.export_buffer(r, torch.device("cpu")).clone() for r in results]
