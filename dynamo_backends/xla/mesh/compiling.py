"""Compiles traced programs for a mesh: how inputs and outputs are split, and what is reported."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend import core
from torch import Tensor

from dynamo_backends.graph.aliasing import tensor_bytes
from dynamo_backends.graph.graph import Graph, Role
from dynamo_backends.graph.layouts import InputConverter, OutputConverter
from dynamo_backends.interface.errors import reraise_as_compile_error
from dynamo_backends.interface.mesh import (
    CollectiveSummary,
    InputPlacement,
    Mesh,
    MeshLayout,
    MeshReport,
    ParameterPlacement,
)
from dynamo_backends.xla import _jaxlib, prologue
from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.mesh.devices import MeshDevice
from dynamo_backends.xla.repeated_operands import may_fuse_products


class ProgramShardings:
    """Holds the sharding of each input and output of an SPMD program.

    Args:
        device: All devices of the mesh.
        graph: Graph of the step.
        layout: Where its inputs and outputs are.

    Attributes:
        inputs: One sharding per input.
        outputs: One per output; what is updated stays where it is.
        results: Shape and dtype of each output, as the program has it.
    """

    def __init__(self, device: MeshDevice, graph: Graph, layout: MeshLayout):
        values = [p.meta["val"] for p in graph.placeholders]
        importers = list(map(InputConverter, values))
        self.inputs: list[Any] = [
            device.sharding(placement, importer.storage.order)
            for placement, importer in zip(layout.inputs, importers, strict=True)
        ]
        self.outputs: list[Any] = [self.inputs[i] for i in graph.updates]
        self.results = [
            jax.ShapeDtypeStruct(importers[i].dense_shape, to_jax(importers[i].dtype))
            for i in graph.updates
        ]
        first = len(self.outputs)
        for node, placement in zip(graph.outputs[first:], layout.outputs[first:], strict=True):
            value = node.meta["val"]
            export = OutputConverter(value)
            storage = export.storage
            self.outputs.append(device.sharding(placement, storage.order, storage.expanded))
            self.results.append(jax.ShapeDtypeStruct(export.dense_shape, to_jax(value.dtype)))


def partitioned_options(
    options: LoweringOptions, device: MeshDevice, graph: Graph, layout: MeshLayout
) -> LoweringOptions:
    """Returns lowering options for a program that XLA's SPMD partitioner splits.

    Where all devices share the first dimension of the batch, they are named.

    Args:
        options: Options of the lowering for one device.
        device: All devices of the mesh.
        graph: What is lowered.
        layout: Where its inputs are.
    """
    placements = [
        placement
        for given, placement in zip(graph.inputs, layout.inputs, strict=True)
        if given.role is Role.ACTIVATION
    ]
    is_shared = any(placement and set(placement) == {0} for placement in placements)
    return replace(options, partitioned=True, grid=device.grid if is_shared else None)


def lower_split(
    program: Any,
    device: MeshDevice,
    splits: ProgramShardings,
    what: str,
    donated: Sequence[int] = (),
) -> Any:
    """Lowers a jaxpr to StableHLO with input and output shardings.

    Args:
        program: A jaxpr.
        device: All devices of the mesh.
        splits: How its inputs and outputs are split.
        what: Is lowered, for errors.
        donated: Inputs whose memory it may have.

    Raises:
        CompileError: jax refuses it.
    """
    with reraise_as_compile_error(f"jax cannot lower the {what} for the mesh"):
        function = jax.jit(
            prologue.as_function(program),
            in_shardings=tuple(splits.inputs),
            out_shardings=splits.outputs,
            donate_argnums=tuple(donated),
            keep_unused=True,
        )
        traced = function.trace(*prologue.avals(program))
        return traced.lower(lowering_platforms=(device.platform,))


def compile_lowered(lowered: Any, program: core.ClosedJaxpr, device: MeshDevice, what: str) -> Any:
    """Compiles a lowered StableHLO program to an SPMD executable for the mesh.

    Processes take their temporary memory from the system anew in each step, and pay for each page.
    So their gradients are not all kept until the last one is there. Devices of one process have
    them summed together: they are threads, which seldom run all at once.

    Args:
        lowered: The StableHLO.
        program: That it was lowered from.
        device: All devices of the mesh.
        what: It is, for errors.

    Raises:
        CompileError: XLA refuses it.
    """
    with reraise_as_compile_error(f"XLA cannot compile the {what} for the mesh"):
        module = _jaxlib.bytecode(lowered)
        apart = device.ranks is not None
        return _jaxlib.compile_spmd_program(
            device.client,
            device.handles,
            module,
            reduces_apart=apart,
            fuses_products=may_fuse_products(program),
        )


_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_CALL = re.compile(rf" = (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


def collectives_of(program: str) -> tuple[CollectiveSummary, ...]:
    """Counts the collectives in HLO text and sums their bytes, one entry per kind.

    Args:
        program: XLA's text of a module for one device: a line for each operation.
    """
    sizes: dict[str, list[int]] = {}
    for line in program.splitlines():
        if (found := _CALL.search(line)) is not None:
            arrays = [_bytes(*each) for each in _ARRAY.findall(found[1])]
            # What a start returns has its operands beside its results.
            size = max(arrays, default=0) if found[3] else sum(arrays)
            sizes.setdefault(found[2], []).append(size)
    return tuple(CollectiveSummary(k, len(sizes[k]), sum(sizes[k])) for k in _KINDS if k in sizes)


def _bytes(letters: str, bits: str, shape: str) -> int:
    width = 1 if letters == "pred" else math.ceil(int(bits or 0) / 8)
    return width * math.prod(int(n) for n in shape.split(",") if n)


def mesh_report(
    mesh: Mesh, executable: Any, parameters: Sequence[tuple[InputPlacement, Tensor]]
) -> MeshReport:
    """Returns the report of a mesh: placements, collectives and memory.

    Args:
        mesh: The mesh.
        executable: Compiled for it.
        parameters: Each with a fake tensor like it.
    """
    memory = _jaxlib.compiled_memory_stats(executable)
    return MeshReport(
        mesh=str(mesh),
        parameters=tuple(_parameter(mesh, *each) for each in parameters),
        collectives=collectives_of(_jaxlib.program_text(executable)),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    )


def _parameter(mesh: Mesh, placed: InputPlacement, value: Tensor) -> ParameterPlacement:
    parts = [mesh.shard_count(placed.placement, d) for d in range(value.dim())]
    return ParameterPlacement(
        name=placed.name,
        value=f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}",
        placement=mesh.describe(placed.placement),
        bytes=tensor_bytes(value) // int(np.prod(parts)),
    )
