"""Compiles a graph: trace its lowering with jax, split off the prologue, hand StableHLO to PJRT."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend import core

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import InputConverter, MemoryLayout, OutputConverter
from dynamo_backends.interface.counters import VENDOR, time_stage
from dynamo_backends.interface.errors import reraise_as_compile_error
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.xla import _jaxlib, prologue
from dynamo_backends.xla.conv_attention_rewrites import (
    move_scale_after_conv,
    undo_repeated_kv_heads,
)
from dynamo_backends.xla.custom_calls import find_custom_calls
from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from dynamo_backends.xla.lowering.values import ChannelsLast, Value, to_logical_array
from dynamo_backends.xla.matmul_rewrites import simplify_products, split_skinny
from dynamo_backends.xla.repeated_operands import may_fuse_products
from dynamo_backends.xla.runtime import PjrtDevice, XlaExecutable, XlaInputMap
from dynamo_backends.xla.torch_prologue import jaxpr_to_torch_prologue
from dynamo_backends.xla.updating import executable_for, find_donatable_inputs, results_order


def compile_graph(
    graph: Graph,
    device: PjrtDevice,
    options: LoweringOptions,
    lowering: GraphLowering | None = None,
) -> XlaExecutable:
    """Compiles a graph of supported calls, which may be changed, for one device.

    Args:
        graph: With static shapes.
        device: Where it will run.
        options: For the lowering.
        lowering: Lowering of the graph, instead of the plain one.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: XLA refuses the program.
    """
    if lowering is None:
        if device.platform == "cpu":
            move_scale_after_conv(graph)
        undo_repeated_kv_heads(graph)
        lowering = GraphLowering(graph.module.graph, options)
    # 64-bit types exist in this thread and while compiling only; the executable keeps them.
    with jax.enable_x64(True):
        traced = simplify_products(_trace(graph, lowering))
        # Whether weights on a GPU are still those that were prepared, only the GPU could say: each
        # call would wait for all that is on the way.
        parts = prologue.split_prologue(
            traced, len(graph.weights), prepare=device.platform != "cuda"
        )
        if device.platform == "cpu":
            main = split_skinny(parts.main, torch.get_num_threads())
            parts = replace(parts, main=main)
        main, updated = _compile_main(graph, parts, device)
        before = _compile_prologue(parts.prologue, device)
    return_free_memory()
    wiring = XlaInputMap(parts.transformed, parts.untouched, parts.activations, updated)
    return executable_for(graph)(device, graph, main, before, wiring)


def _compile_main(
    graph: Graph, parts: prologue.SplitProgram, device: PjrtDevice
) -> tuple[Any, tuple[int, ...]]:
    """Returns the main program, and which activations it updates in place (see `XlaInputMap`)."""
    updated = find_donatable_inputs(graph, parts.activations, device)
    fuses = may_fuse_products(parts.main)
    if updated:
        program = prologue.with_outputs(parts.main, results_order(graph, updated))
        first = len(program.jaxpr.invars) - len(parts.activations)
        slots = [first + parts.activations.index(i) for i in updated if i in parts.activations]
        lowered = _lower(program, device, slots)
        if not find_custom_calls(lowered):
            return _compile(lowered, device, fuses_products=fuses), updated
    return _compile(_lower(parts.main, device), device, fuses_products=fuses), ()


def _compile_prologue(program: core.ClosedJaxpr | None, device: PjrtDevice) -> Any:
    if program is None:
        return None
    prepared = jaxpr_to_torch_prologue(program) if device.platform == "cpu" else None
    if prepared is not None:
        return prepared
    return _compile(_lower(program, device), device, runs_once=True)


def _trace(graph: Graph, lowering: GraphLowering) -> core.ClosedJaxpr:
    order = [*graph.weights, *graph.activations]
    values = [p.meta["val"] for p in graph.placeholders]
    storages = [InputConverter(v).storage if _is_tensor(v) else None for v in values]
    exporters = [OutputConverter(n.meta["val"]) for n in graph.outputs]

    def program(*arrays: jax.Array) -> list[jax.Array]:
        inputs: list[Any] = [None] * len(order)
        for place, array in zip(order, arrays, strict=True):
            storage = storages[place]
            inputs[place] = array if storage is None else from_storage(array, storage)
        results = lowering(inputs)
        return [to_storage(r, e.storage) for r, e in zip(results, exporters, strict=True)]

    shapes = [to_shape_dtype_struct(values[place], storages[place]) for place in order]
    with reraise_as_compile_error("jax cannot trace the graph"):
        return jax.make_jaxpr(program)(*shapes)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "stride")


def to_shape_dtype_struct(value: Any, storage: MemoryLayout | None) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the jax array for a tensor with this memory order."""
    if storage is None:  # a symbol, already replaced by its value wherever it was used
        return jax.ShapeDtypeStruct((), jnp.int64)
    shape = [value.shape[d] for d in storage.order]
    return jax.ShapeDtypeStruct(shape, to_jax(value.dtype))


def from_storage(array: jax.Array, storage: MemoryLayout) -> Value:
    """Converts an array in memory order to a value in torch's dimension order."""
    if storage.is_channels_last:
        return ChannelsLast(array)
    if storage.is_row_major:
        return array
    return jnp.transpose(array, storage.inverse_order)


def to_storage(value: Value, storage: MemoryLayout) -> jax.Array:
    """Converts a value in torch's dimension order to an array in memory order."""
    if storage.is_channels_last and isinstance(value, ChannelsLast):
        return value.array
    array = to_logical_array(value)
    for dim in storage.expanded:
        array = jax.lax.slice_in_dim(array, 0, 1, axis=dim)
    return array if storage.is_row_major else jnp.transpose(array, storage.order)


def _lower(program: core.ClosedJaxpr, device: PjrtDevice, donated: Sequence[int] = ()) -> Any:
    with reraise_as_compile_error("jax cannot lower the graph"):
        function = prologue.as_function(program)
        jitted = jax.jit(function, donate_argnums=tuple(donated), keep_unused=True)
        traced = jitted.trace(*prologue.avals(program))
        return traced.lower(lowering_platforms=(device.platform,))


def _compile(lowered: Any, device: PjrtDevice, **how: bool) -> Any:
    with reraise_as_compile_error("XLA cannot compile the graph"):
        module = _jaxlib.bytecode(lowered)
        with time_stage(VENDOR):
            return _jaxlib.compile_program(device.client, device.handle, module, **how)
