"""Runs graphs for inference on a mesh: each device has its parts of the weights and of the batch.

Weights are split once, when they are bound. Inputs are split at each call, and results come back to
torch whole. Of several processes each gives the whole batch, and gets whole results.
"""

import hashlib
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import torch
from torch import Tensor

from dynamo_backends.aot.step.program.mesh_layout import LikeBatch
from dynamo_backends.graph.graph import WEIGHT_ROLES, Graph
from dynamo_backends.graph.layouts import InputConverter, OutputConverter
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.mesh import InputPlacement, Mesh, MeshLayout, Placement
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.runtime.weight_binding import value_bits
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.matmul_rewrites import simplify_products
from dynamo_backends.xla.mesh.compiling import (
    ProgramShardings,
    compile_lowered,
    lower_split,
    mesh_report,
    partitioned_options,
)
from dynamo_backends.xla.mesh.devices import MeshDevice
from dynamo_backends.xla.steps import trace_step

_ADVICE = (
    "Compile the same model with equal weights on all processes, and call it with the same whole "
    "batches in the same order."
)


def compile_on_mesh(
    graph: Graph, device: MeshDevice, options: LoweringOptions, batch: Placement
) -> "MeshExecutable":
    """Compiles a graph for all devices of a mesh as one program.

    Args:
        graph: With static shapes; its weights know where they are (`Input.placed`).
        device: All devices of the mesh.
        options: For the lowering on one device.
        batch: Where inputs are that are no weights, and that it fits.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: XLA refuses the program.
        RankError: Another process compiles another graph.
    """
    layout = _layout_of(graph, device.mesh, batch)
    splits = ProgramShardings(device, graph, layout)
    options = partitioned_options(options, device, graph, layout)
    with jax.enable_x64(True):
        program = simplify_products(trace_step(graph, options, is_flat=False))
        lowered = lower_split(program, device, splits, "graph")
        key = _agreed(device, graph, lowered)
        executable = compile_lowered(lowered, program, device, "graph")
    return_free_memory()
    if device.ranks is not None:
        device.ranks.add_program(key)
    return MeshExecutable(device, graph, executable, splits, key)


def _layout_of(graph: Graph, mesh: Mesh, batch: Placement) -> MeshLayout:
    values = [p.meta["val"] for p in graph.placeholders]
    inputs: list[Placement] = []
    of_batch: list[Tensor] = []
    for given, value in zip(graph.inputs, values, strict=True):
        if given.placed is not None:
            inputs.append(given.placed.placement)
        elif given.role not in WEIGHT_ROLES and mesh.can_shard(batch, value.shape) and value.dim():
            inputs.append(tuple(None if d is None else d % value.dim() for d in batch))
            of_batch.append(value)
        else:
            inputs.append(mesh.replicated)
    like_batch = LikeBatch(mesh, batch, of_batch)
    outputs = [like_batch(node.meta["val"]) for node in graph.outputs]
    if mesh.of_ranks:  # whole on all ranks: whoever reads one waits for nobody
        outputs = [mesh.replicated] * len(outputs)
    return MeshLayout(tuple(inputs), tuple(outputs), {})


def _agreed(device: MeshDevice, graph: Graph, lowered: Any) -> str:
    """Returns what stands for a program; raises on all ranks if they have different ones."""
    if device.ranks is None:
        return ""
    key = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    facts = [
        f"has an input of {p.meta['val'].dtype}{list(p.meta['val'].shape)}"
        for p in graph.placeholders
    ]
    facts += [f"calls {node.target}" for node in graph.calls] + [f"has program {key[:16]}"]
    device.ranks.require_agreement("compiles a graph", key, facts, _ADVICE)
    return key


class MeshExecutable(Executable):
    """A compiled graph on a mesh.

    Args:
        device: All devices of the mesh.
        graph: What was compiled.
        executable: Compiled from it.
        splits: The shardings of its inputs and outputs.
        key: Key of the program, the same on all ranks and for no other.
    """

    serves_range = True  # of a graph of which nothing varies

    def __init__(
        self,
        device: MeshDevice,
        graph: Graph,
        executable: Any,
        splits: ProgramShardings,
        key: str = "",
    ):
        self._device = device
        self.executable = executable
        self._splits = splits
        self._key = key
        self._what = f"runs a graph of {len(graph.calls)} operators, program {key[:8]}"
        values = [p.meta["val"] for p in graph.placeholders]
        self._weights, self._activations = graph.weights, graph.activations
        self._importers = list(map(InputConverter, values))
        self._placed: list[tuple[InputPlacement, Tensor]] = [
            (x.placed, value)
            for x, value in zip(graph.inputs, values, strict=True)
            if x.placed is not None
        ]
        self._names = [x.placed.name if x.placed else x.name for x in graph.inputs]
        outputs = [node.meta["val"] for node in graph.outputs]
        self._exporters = list(map(OutputConverter, outputs))
        self._dtypes = [value.dtype for value in outputs]
        self._call = self._caller()

    def _caller(self) -> Callable[[list[Any]], list[Any]]:
        call = _jaxlib.make_multi_device_call(
            self.executable, self._splits.results, self._splits.outputs
        )
        ranks = self._device.ranks
        if ranks is None:
            return call
        return lambda arrays: list(ranks.run_on_all_ranks(self._what, lambda: call(arrays)))

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`: weights are split here, and at no call."""
        self._agree_on(weights)
        arrays: list[Any] = [None] * len(self._importers)
        for place, weight in zip(self._weights, weights, strict=True):
            arrays[place] = self._split(place, weight)

        def run(inputs: list[Tensor]) -> list[Tensor]:
            given = list(arrays)
            for place, tensor in zip(self._activations, inputs, strict=True):
                given[place] = self._split(place, tensor)
            if self._device.ranks is not None:
                self._device.ranks.require_same_program(self._what, self._key)
            results = self._device.execute(self._call, given)
            return list(map(self._on_host, results, self._exporters, self._dtypes))

        return run, range(len(weights))

    def _split(self, place: int, tensor: Tensor) -> Any:
        tensor = self._importers[place](tensor.detach())
        return self._device.split(tensor, self._splits.inputs[place])

    def _on_host(self, array: Any, export: OutputConverter, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(export.dense_shape, dtype=dtype)
        self._device.download(array, whole.view(-1))
        return export(whole)

    def _agree_on(self, weights: Sequence[Tensor]) -> None:
        """Raises on all ranks if they have different weights."""
        ranks = self._device.ranks
        if ranks is None or not weights:
            return
        marks = [zlib.crc32(value_bits(w.contiguous()).numpy().tobytes()) for w in weights]
        facts = [
            f"has {self._names[place]} with contents {mark:x}"
            for place, mark in zip(self._weights, marks, strict=True)
        ]
        ranks.require_agreement("takes weights", str(marks), facts, _ADVICE)

    def set_report(self, report: GraphReport) -> None:
        """See `Executable.set_report`."""
        report.mesh = mesh_report(self._device.mesh, self.executable, self._placed)
