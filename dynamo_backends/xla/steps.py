"""Compiles whole training steps: the inputs that a step updates are donated to XLA."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import InputConverter, OutputConverter
from dynamo_backends.interface.errors import reraise_as_compile_error
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.xla import _jaxlib, prologue
from dynamo_backends.xla.compiler import from_storage, to_shape_dtype_struct, to_storage
from dynamo_backends.xla.custom_calls import find_custom_calls
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from dynamo_backends.xla.lowering.values import Flat, Value, to_flat_array
from dynamo_backends.xla.matmul_rewrites import simplify_products
from dynamo_backends.xla.repeated_operands import may_fuse_products
from dynamo_backends.xla.resident_step import ResidentStep
from dynamo_backends.xla.runtime import PjrtDevice
from dynamo_backends.xla.step_runtime import XlaCopyingStep, XlaStep, in_one_dimension


def compile_step(graph: Graph, device: PjrtDevice, options: LoweringOptions) -> StepProgram:
    """Compiles a graph of the kind "step" for the CPU.

    A program that calls other libraries is given nothing (see `custom_calls`).

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: XLA refuses the program.
    """
    with jax.enable_x64(True):
        program = simplify_products(trace_step(graph, options, is_flat=not device.is_remote))
        lowered = _lower(program, device, donated(graph))
        # A device's program runs by itself, and its failure is seen when something is read.
        can_fail = not device.is_remote and bool(find_custom_calls(lowered))
        if can_fail:
            lowered = _lower(program, device, ())
        executable = _compile(lowered, device, may_fuse_products(program))
    return_free_memory()
    if device.is_remote:
        return ResidentStep(device, graph, executable)
    if can_fail:
        return XlaCopyingStep(device, graph, executable)
    return XlaStep(device, graph, executable)


def load_step(parts: Mapping[str, bytes], graph: Graph, device: PjrtDevice) -> StepProgram:
    """Recreates a step from `StepProgram.dump`.

    Raises:
        CompileError: The parts are incomplete, or XLA refuses them.
    """
    with reraise_as_compile_error("XLA cannot load the cached step"):
        executable = _jaxlib.deserialize(device.client, device.handle, parts["main"])
        kind: dict[bytes, type[XlaStep | XlaCopyingStep | ResidentStep]] = {
            b"donated": XlaStep,
            b"copied": XlaCopyingStep,
            b"resident": ResidentStep,
        }
        made = kind[parts["updates"]]
    return_free_memory()
    return made(device, graph, executable)


def donated(graph: Graph) -> tuple[int, ...]:
    """Returns positions of the inputs that a step updates and thus donates."""
    return tuple(i for i, x in enumerate(graph.inputs) if x.updated_by is not None)


def trace_step(
    graph: Graph,
    options: LoweringOptions,
    is_flat: bool,
    axes: Sequence[tuple[str, int]] | None = None,
) -> Any:
    """Returns a step's lowering as a jaxpr.

    Args:
        graph: Graph of the kind "step".
        options: Options of the lowering.
        is_flat: What is updated has one dimension (see `in_one_dimension`).
        axes: Names and sizes of what collectives go over.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
    """
    values = [p.meta["val"] for p in graph.placeholders]
    storages = [InputConverter(v).storage for v in values]
    updated = donated(graph)
    # What is updated keeps its layout; the updates are the first outputs, in the inputs' order.
    exported = [OutputConverter(n.meta["val"]).storage for n in graph.outputs[len(updated) :]]
    lowering = GraphLowering(graph.module.graph, options)

    def program(*arrays: jax.Array) -> list[jax.Array]:
        inputs: list[Value | Flat] = [
            from_storage(array, storage)
            if array.ndim == value.ndim
            else Flat(array, tuple(value.shape), storage.order)  # see `in_one_dimension`
            for array, value, storage in zip(arrays, values, storages, strict=True)
        ]
        outputs = lowering(inputs)
        results = [
            to_flat_array(r, storages[i].order)
            if isinstance(inputs[i], Flat)
            else to_storage(r, storages[i])
            for i, r in zip(updated, outputs, strict=False)
        ]
        others = zip(outputs[len(updated) :], exported, strict=True)
        return results + [to_storage(r, s) for r, s in others]

    with reraise_as_compile_error("jax cannot trace the step"):
        shapes = list(map(to_shape_dtype_struct, values, storages))
        for i in updated if is_flat else ():
            shapes[i] = in_one_dimension(shapes[i])
        return jax.make_jaxpr(program, axis_env=axes)(*shapes)


def _lower(program: Any, device: PjrtDevice, donated: tuple[int, ...]) -> Any:
    with reraise_as_compile_error("jax cannot lower the step"):
        function = jax.jit(prologue.as_function(program), donate_argnums=donated, keep_unused=True)
        traced = function.trace(*prologue.avals(program))
        return traced.lower(lowering_platforms=(device.platform,))


def _compile(lowered: Any, device: PjrtDevice, fuses: bool) -> Any:
    with reraise_as_compile_error("XLA cannot compile the step"):
        module = _jaxlib.bytecode(lowered)
        return _jaxlib.compile_program(
            device.client,
            device.handle,
            module,
            sparing=True,
            fuses_products=fuses,
        )
