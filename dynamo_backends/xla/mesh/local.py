"""Graphs of torch's own distributed programs: each process has tensors of its own.

All processes compile one program in which collectives are XLA's. To jax it is a program of arrays
with one dimension more, which is split over the processes.
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import ALIGNMENT, Exporter, Importer
from dynamo_backends.interface.errors import (
    CompileError,
    LoweringError,
    RankError,
    as_compile_error,
    brief_error,
)
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.mesh import Mesh
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.memory import return_free_memory
from dynamo_backends.runtime.ranks.ranks import Ranks, this_job
from dynamo_backends.xla import _jaxlib, prologue
from dynamo_backends.xla.lowering.collectives import AXIS, is_collective
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.mesh.agreement import compiled_together
from dynamo_backends.xla.mesh.compiling import compile_lowered
from dynamo_backends.xla.mesh.devices import MeshDevice, open_mesh
from dynamo_backends.xla.mesh.reports import mesh_report
from dynamo_backends.xla.products import simplify_products
from dynamo_backends.xla.steps import trace_step


def has_collectives(graph: Graph) -> bool:
    """Returns whether a graph that XLA takes talks to other processes."""
    return any(map(is_collective, graph.calls))


def compile_local(graph: Graph, options: LoweringOptions) -> "LocalExecutable":
    """Compiles a graph whose collectives are of all processes; all of them do so together.

    Args:
        graph: With static shapes.
        options: For the lowering.

    Raises:
        CompileError: A process cannot compile it; all raise.
        RankError: One of them has ended, or compiles something else.
    """
    ranks = this_job()
    mesh = Mesh((AXIS,), (ranks.size,), tuple(range(ranks.size)), of_ranks=True)
    device = open_mesh("cpu", mesh)
    exchanged = " ".join(str(n.target) for n in graph.calls if is_collective(n))
    key = hashlib.sha256(exchanged.encode()).hexdigest()
    executable, failure = None, None
    try:
        executable = _compiled(graph, device, options)
    except LoweringError as error:  # what waits for a collective must not be told apart from it
        failure = CompileError(str(error))
    except Exception as error:
        failure = error if isinstance(error, CompileError) else CompileError(brief_error(error))
    compiled_together(ranks, f"compiles a program with collectives ({key[:8]})", failure)
    key = f"{key[:8]}, number {len(_compiled_here)}"
    _compiled_here.append(key)
    ranks.add_program(key)
    return LocalExecutable(device, graph, executable, key)


_compiled_here: list[str] = []  # on all processes the same


def _compiled(graph: Graph, device: MeshDevice, options: LoweringOptions) -> Any:
    sharding = NamedSharding(device.grid, PartitionSpec(AXIS))
    with jax.enable_x64(True):
        axes = [(AXIS, device.mesh.size)]
        program = simplify_products(trace_step(graph, options, is_flat=False, axes=axes))
        inner = prologue.as_function(program)

        def local(*arrays: jax.Array) -> list[jax.Array]:
            return [result[None] for result in inner(*(array[0] for array in arrays))]

        with as_compile_error("jax cannot lower the graph for several processes"):
            split = PartitionSpec(AXIS)
            spread = jax.shard_map(
                local, mesh=device.grid, in_specs=split, out_specs=split, check_vma=False
            )
            shapes = [
                jax.ShapeDtypeStruct((device.mesh.size, *x.shape), x.dtype)
                for x in prologue.avals(program)
            ]
            function = jax.jit(
                spread, in_shardings=sharding, out_shardings=sharding, keep_unused=True
            )
            lowered = function.trace(*shapes).lower(lowering_platforms=(device.platform,))
        executable = compile_lowered(lowered, program, device, "graph")
    return_free_memory()
    return executable


class LocalExecutable(Executable):
    """A compiled graph with collectives.

    Args:
        device: The devices of all processes.
        graph: What was compiled.
        executable: Compiled from it.
        key: Of the program, the same on all ranks and for no other.
    """

    serves_range = True  # of a graph of which nothing varies

    def __init__(self, device: MeshDevice, graph: Graph, executable: Any, key: str):
        assert device.ranks is not None
        self._device = device
        self._ranks: Ranks = device.ranks
        self.executable = executable
        self._key = key
        self._what = f"runs a program with collectives ({key})"
        self._sharding = NamedSharding(device.grid, PartitionSpec(AXIS))
        values = [p.meta["val"] for p in graph.placeholders]
        self._weights, self._activations = graph.weights, graph.activations
        self._importers = list(map(Importer, values))
        self._exporters = [Exporter(n.meta["val"]) for n in graph.outputs]
        self._execute = _jaxlib.parts_caller(executable)

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`: weights are read where they are, if XLA can."""
        arrays: list[Any] = [None] * len(self._importers)
        copied = set()
        for i, (place, weight) in enumerate(zip(self._weights, weights, strict=True)):
            tensor = self._importers[place](weight.detach())
            arrays[place] = self._part(tensor)
            if tensor.data_ptr() != weight.data_ptr() or tensor.data_ptr() % ALIGNMENT:
                copied.add(i)

        def run(inputs: list[Tensor]) -> list[Tensor]:
            given = list(arrays)
            for place, tensor in zip(self._activations, inputs, strict=True):
                given[place] = self._part(self._importers[place](tensor.detach()))
            self._ranks.check_program(self._what, self._key)
            results = self._ranks.together(self._what, lambda: self._computed(given))
            return [
                export(from_dlpack(_jaxlib.export_dlpack(part))[0])
                for export, part in zip(self._exporters, results, strict=True)
            ]

        return run, copied

    def _part(self, tensor: Tensor) -> Any:
        part = self._device.import_tensor(tensor.unsqueeze(0))
        shape = (self._device.mesh.size, *part.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [part])

    def _computed(self, arrays: list[Any]) -> list[Any]:
        """Results once they are there; the next program must not begin before on any process."""
        try:
            parts = self._execute(arrays)
            for part in parts:
                part.block_until_ready()
        except Exception as error:
            if "gloo" in str(error).lower():
                raise  # a connection is broken: the others' signs say why
            raise RankError(f"a program of all ranks failed here: {brief_error(error)}") from error
        return parts

    def report_to(self, report: GraphReport) -> None:
        """See `Executable.report_to`."""
        report.mesh = mesh_report(self._device.mesh, self.executable, ())
