"""Graphs of torch's distributed programs: XLA on all processes or torch on all, decided together.

All processes compile one program in which collectives are XLA's. To jax it is a program of arrays
with one dimension more, which is split over the processes.
"""

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor, fx

from dynamo_backends._torch_private import from_dlpack
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import ALIGNMENT, InputConverter, OutputConverter
from dynamo_backends.graph.partition import extract_part
from dynamo_backends.interface.errors import (
    CompileError,
    LoweringError,
    RankError,
    brief_error,
    reraise_as_compile_error,
)
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.mesh import Mesh
from dynamo_backends.interface.plan import Plan
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.runtime.rank_monitor import describe_per_rank
from dynamo_backends.runtime.ranks import RankGroup, default_rank_group
from dynamo_backends.xla import _jaxlib, prologue
from dynamo_backends.xla.lowering.collectives import AXIS, is_collective, is_wait
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.matmul_rewrites import simplify_products
from dynamo_backends.xla.mesh.compiling import compile_lowered, mesh_report
from dynamo_backends.xla.mesh.devices import MeshDevice, open_mesh
from dynamo_backends.xla.steps import trace_step


def has_collectives(graph: Graph) -> bool:
    """Returns whether a graph that XLA takes talks to other processes."""
    return any(map(is_collective, graph.calls))


def compile_distributed_graph(graph: Graph, options: LoweringOptions) -> "DistributedExecutable":
    """Compiles a graph with torch.distributed collectives on all processes at once.

    Args:
        graph: With static shapes.
        options: For the lowering.

    Raises:
        CompileError: A process cannot compile it; all raise.
        RankError: One of them has ended, or compiles something else.
    """
    ranks = default_rank_group()
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
    raise_if_any_rank_failed(ranks, f"compiles a program with collectives ({key[:8]})", failure)
    key = f"{key[:8]}, number {len(_compiled_here)}"
    _compiled_here.append(key)
    ranks.add_program(key)
    return DistributedExecutable(device, graph, executable, key)


_compiled_here: list[str] = []  # on all processes the same


def _compiled(graph: Graph, device: MeshDevice, options: LoweringOptions) -> Any:
    sharding = NamedSharding(device.grid, PartitionSpec(AXIS))
    with jax.enable_x64(True):
        axes = [(AXIS, device.mesh.size)]
        program = simplify_products(trace_step(graph, options, is_flat=False, axes=axes))
        inner = prologue.as_function(program)

        def local(*arrays: jax.Array) -> list[jax.Array]:
            return [result[None] for result in inner(*(array[0] for array in arrays))]

        with reraise_as_compile_error("jax cannot lower the graph for several processes"):
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


class DistributedExecutable(Executable):
    """Runs a compiled graph with torch.distributed collectives.

    Args:
        device: The devices of all processes.
        graph: What was compiled.
        executable: Compiled from it.
        key: Key of the program, the same on all ranks and for no other.
    """

    serves_range = True  # of a graph of which nothing varies

    def __init__(self, device: MeshDevice, graph: Graph, executable: Any, key: str):
        assert device.ranks is not None
        self._device = device
        self._ranks: RankGroup = device.ranks
        self.executable = executable
        self._key = key
        self._what = f"runs a program with collectives ({key})"
        self._sharding = NamedSharding(device.grid, PartitionSpec(AXIS))
        values = [p.meta["val"] for p in graph.placeholders]
        self._weights, self._activations = graph.weights, graph.activations
        self._importers = list(map(InputConverter, values))
        self._exporters = [OutputConverter(n.meta["val"]) for n in graph.outputs]
        self._execute = _jaxlib.make_multi_process_call(executable)

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
            self._ranks.require_same_program(self._what, self._key)
            results = self._ranks.run_on_all_ranks(self._what, lambda: self._computed(given))
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
            raise RankError(
                f"a program with collectives failed on this rank: {brief_error(error)}"
            ) from error
        return parts

    def set_report(self, report: GraphReport) -> None:
        """See `Executable.set_report`."""
        report.mesh = mesh_report(self._device.mesh, self.executable, ())


PATIENCE = 300.0
"""Seconds that who compiles a graph with collectives waits for the others to compile it, too."""


@dataclass(frozen=True)
class RankGraphSummary:
    """Summarises a rank's graph for comparison with those of the other ranks.

    Attributes:
        graph: Its fingerprint.
        exchanged: What its collectives exchange, in order.
        is_chain: Whether each of these needs the result of the one before, and XLA takes all calls,
            so that no other order is possible.
    """

    graph: str
    exchanged: tuple[str, ...]
    is_chain: bool


def agree_on_plan(graph: Graph, plan: Plan) -> Plan:
    """Returns a plan all ranks agree on; leaves collectives to torch if graphs differ.

    Args:
        graph: What is planned.
        plan: This process's own.

    Raises:
        RankError: Another process has ended, or compiles no graph with collectives.
    """
    calls = [n for n in graph.calls if is_collective(n) and n.name not in plan.eager]
    if not calls:
        return plan
    ranks = default_rank_group()
    computed = extract_part(graph, graph.calls, on_backend=True).graph  # without inputs of no use
    is_chain = not plan.eager and _is_chain(calls)
    offer = RankGraphSummary(fingerprint(computed), tuple(map(_exchanged, calls)), is_chain)
    offers = ranks.all_gather_object("compiles a graph with collectives", offer, PATIENCE)
    reason = find_rank_mismatch(offers)
    if reason is None:
        return plan
    distributed = [n for n in graph.calls if is_collective(n) or is_wait(n)]
    left = {n.name: reason for n in distributed if n.name not in plan.eager}
    return replace(plan, eager={**plan.eager, **left})


def find_rank_mismatch(offers: Sequence[RankGraphSummary]) -> str | None:
    """Returns why the ranks' graphs cannot run as XLA programs; None if they can."""
    first = offers[0]
    for rank, other in enumerate(offers):
        if other.graph == first.graph:
            continue
        if other.exchanged != first.exchanged:
            pairs = zip(first.exchanged, other.exchanged, strict=False)
            pair = next((p for p in pairs if p[0] != p[1]), None) or (
                f"runs {len(first.exchanged)} collectives",
                f"runs {len(other.exchanged)} collectives",
            )
            return f"the ranks' graphs differ: {describe_per_rank({0: pair[0], rank: pair[1]})}"
        if not (first.is_chain and other.is_chain):
            return (
                f"the graphs of rank 0 and rank {rank} differ, so XLA may run collectives in "
                "different orders"
            )
    return None


def _exchanged(node: fx.Node) -> str:
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return f"calls {node.target} with {value.dtype}{list(value.shape)} {list(node.args[1:])}"


def _is_chain(calls: Sequence[fx.Node]) -> bool:
    """Returns whether each call needs, on some way, the result of the one before."""
    for before, call in itertools.pairwise(calls):
        reached: set[fx.Node] = {before}
        pending = [before]
        while pending:
            for user in pending.pop().users:
                if user not in reached:
                    reached.add(user)
                    pending.append(user)
        if call not in reached:
            return False
    return True


def raise_if_any_rank_failed(ranks: RankGroup, what: str, outcome: Exception | None) -> None:
    """Raises on all ranks if compilation failed on any of them.

    Args:
        ranks: All processes.
        what: Is compiled; the same on all.
        outcome: What was raised on this one.

    Raises:
        Exception: What was raised on this one.
        CompileError: Another one failed.
        RankError: Another one has ended, or compiles something else.
    """
    found = ranks.all_gather_object(what, "" if outcome is None else brief_error(outcome), PATIENCE)
    if outcome is not None:
        raise outcome
    for rank, failure in enumerate(found):
        if failure:
            raise CompileError(f"rank {rank} cannot compile it: {failure}")
