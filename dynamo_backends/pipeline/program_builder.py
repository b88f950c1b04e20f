"""Builds a program of a graph: partitions it, compiles or loads each block."""

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, compile_with_inductor
from dynamo_backends.graph.aliasing import is_replayed_view
from dynamo_backends.graph.call_arguments import scalar_overflow_reason
from dynamo_backends.graph.donation import mark_donated_inputs
from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.graph.partition import (
    GraphPart,
    PartitionedGraph,
    count_aten_calls,
    extract_part,
    fragmentation_reason,
    partition,
)
from dynamo_backends.graph.planned_decomposition import compile_with_plan, fingerprint_with_plan
from dynamo_backends.graph.random_draws import is_random
from dynamo_backends.graph.symbolic_sizes import (
    FloatWithExpression,
    SizeReader,
    SizeWithExpression,
    all_varying_sizes,
    has_size_expressions,
    size_ranges,
    symbols_of_dimensions,
    with_sizes_as_inputs,
)
from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.counters import (
    LOADING,
    LOWERING,
    PLAN,
    time_stage,
    total,
    track_executable,
)
from dynamo_backends.interface.errors import (
    CompileError,
    DynamoBackendsError,
    FallbackRefusedError,
    LoweringError,
    NotPaddedError,
    RankError,
    suppress_and_log,
)
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.operator_names import matches_operator_name
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.plan import (
    NOT_ATEN,
    SUPPORTED,
    Plan,
    Support,
    support_failure_reason,
)
from dynamo_backends.interface.report import GraphReport, Region, SpeedReport
from dynamo_backends.pipeline import background, compiler_process
from dynamo_backends.pipeline.reporting import (
    describe_fallbacks,
    describe_parts,
)
from dynamo_backends.runtime.load_or_compile import disk_cache_key, load_or_compile
from dynamo_backends.runtime.prepared_executables import UnfrozenExecutable
from dynamo_backends.runtime.program import (
    Block,
    EagerPart,
    Instruction,
    LiteralOutput,
    Program,
    graph_name,
    make_picker,
    part_names,
)
from dynamo_backends.runtime.speed_check import SpeedCheck, describe_operators, speed_cache_key

log = logging.getLogger("dynamo_backends")

aten = torch.ops.aten

DRAWN_BY_TORCH = "random numbers are drawn by torch, so that they equal eager's"
VIEW_OF_OUTPUT = "it is a view of another output"
KEPT_BY_OPTION = "the option keep_in_eager names it"
NUMBER_OF_CALLER = "it makes a tensor from a scalar input of the graph"
FRAGMENTS = "the graph would be split into too many small blocks"
_UNTOLD = frozenset({VIEW_OF_OUTPUT, NUMBER_OF_CALLER})
_AT_THE_EDGES = _UNTOLD | {DRAWN_BY_TORCH}  # these do not split a graph
_BY_DESIGN = _AT_THE_EDGES | {KEPT_BY_OPTION}


def build_program(backend: Backend, graph: Graph, options: Options, report: GraphReport) -> Program:
    """Partitions a graph, compiles its blocks, and returns the program.

    Args:
        backend: What compiles them.
        graph: With static shapes, after all passes.
        options: Options of the backend.
        report: Gets what became of the graph.

    Raises:
        FallbackRefusedError: With `fallback="error"`, if anything would run in eager.
    """
    return ProgramBuilder(backend, graph, (), options, report).build()


class ProgramBuilder:
    """Partitions a static-shape graph into blocks and builds a program of them.

    Args:
        backend: What compiles the blocks.
        graph: After all passes.
        constants: Values of its last placeholders.
        options: Options of the backend.
        report: Gets what became of the graph.

    Attributes:
        serves_range: What was built is right for all sizes for which the passes make this graph.
    """

    def __init__(
        self,
        backend: Backend,
        graph: Graph,
        constants: Sequence[Tensor],
        options: Options,
        report: GraphReport,
    ):
        self._backend = backend
        self._graph = graph
        self._constants = constants
        self._options = options
        self._report = report
        self._plan = Plan()
        self._refused: dict[str, str] = {}
        self._compiled: dict[str, Executable] = {}
        self._reverted = ""
        self._speed_checks: dict[int, SpeedCheck | None] = {}  # by the graph's identity
        self._whole_speed_check: SpeedCheck | None = None
        self._dimensions = symbols_of_dimensions(graph)
        self.serves_range = False

    def build(self) -> Program:
        """Partitions and compiles, repeatedly, until every block compiles."""
        with time_stage(PLAN):
            self._plan = self._planned()
        while True:
            split = self._split()
            self._check_fallbacks(split)
            executables = self._compile_blocks(split)
            if executables is not None and self._is_worth_it(split):
                break
        with suppress_and_log(self._report, "describing the blocks"):
            self._describe(split)
        self.serves_range = has_size_expressions(self._graph.module.graph) and all(
            e is None or e.serves_range or not any(all_varying_sizes(part.graph))
            for part, e in zip(split.parts, executables, strict=True)
        )
        try:
            return self._assemble(split, executables)
        except CompileError:
            if not self.serves_range:
                raise
            log.debug("a program cannot serve a range of sizes", exc_info=True)
            self.serves_range = False
            return self._assemble(split, executables)

    def _split(self) -> PartitionedGraph:
        options = self._options
        # With fallback="error" only what the user named runs in eager, so no block is too small.
        strict = options.fallback == "error"
        minimum = 1 if strict else options.min_block_size
        split = partition(self._graph, self._eager(), minimum, _AT_THE_EDGES)
        split = replace(split, parts=mark_donated_inputs(self._graph, split.parts))
        if strict or options.fragmented == "keep" or self._reverted:
            return split
        reason = fragmentation_reason(split)
        if reason is None:
            return split
        return self._revert(split, reason)

    def _is_worth_it(self, split: PartitionedGraph) -> bool:
        """Returns whether several blocks are not known to be slower than eager, together."""
        self._whole_speed_check = None
        graphs = [part.graph for part in split.parts]
        if sum(part.on_backend for part in split.parts) < 2:
            return True
        try:
            mark = f"{fingerprint_with_plan(self._graph, self._plan)} {sorted(self._refused)}"
            self._whole_speed_check = self._make_speed_check(mark, "graph", graphs)
        except CompileError as error:
            self._reverted = f"{error}; the graph runs in eager instead"
            self._refused = {node.name: str(error) for node in self._graph.calls}
            return False
        return True

    def _revert(self, split: PartitionedGraph, reason: str) -> PartitionedGraph:
        where = "Inductor" if self._options.fragmented == "inductor" else "eager"
        self._reverted = f"{reason}; the graph runs in {where} instead"
        if where == "eager":
            self._refused = {n.name: split.reasons.get(n, FRAGMENTS) for n in self._graph.calls}
        else:
            self._backend = InductorBlockBackend()
            self._plan = self._planned()
            self._compiled.clear()
        return self._split()

    def _eager(self) -> dict[fx.Node, str]:
        """Returns why calls run in eager: by a rule of the pipeline, or because of the backend."""
        eager: dict[fx.Node, str] = {}
        for node in self._graph.calls:
            source = node.args[0] if node.target is operator.getitem else None
            reason = self._kept(node)
            if reason is None:
                reason = self._plan.eager.get(node.name)
            if reason is None and isinstance(source, fx.Node):
                reason = eager.get(source)
            if reason is not None:
                eager[node] = reason
        return eager

    def _kept(self, node: fx.Node) -> str | None:
        """Returns why a call runs in eager whatever the backend says; None if it need not."""
        if node.name in self._refused:
            return self._refused[node.name]
        if is_replayed_view(node):
            return VIEW_OF_OUTPUT
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self._kept(node.args[0])
        if is_random(node):
            return DRAWN_BY_TORCH
        if self._is_of_number(node):
            return NUMBER_OF_CALLER
        if not isinstance(node.target, OpOverload):
            return NOT_ATEN
        if (reason := scalar_overflow_reason(node)) is not None:
            return reason
        return KEPT_BY_OPTION if matches_operator_name(node, self._options.keep_in_eager) else None

    def _is_of_number(self, node: fx.Node) -> bool:
        """Returns whether a tensor is made of a number that is no input of the executable."""
        number = node.args[0] if node.target is aten.scalar_tensor.default else None
        return isinstance(number, SizeWithExpression) and not (
            number.expression.free_symbols <= self._dimensions
        )

    def _planned(self) -> Plan:
        """Returns the backend's plan for the other calls; they run in eager where it fails."""
        graph = self._graph
        calls = [node for node in graph.calls if self._kept(node) is None]
        if not calls:
            return Plan()
        if len(calls) < len(graph.calls):
            graph = extract_part(graph, calls, on_backend=True).graph
        try:
            if background.is_background_thread():
                return compiler_process.plan_in_subprocess(self._backend, graph, self._options)
            return self._backend.plan(graph, self._options)
        except Exception as error:
            reason = support_failure_reason(error, self._backend.name)
            return Plan(dict.fromkeys((node.name for node in calls), reason))

    def _compile_blocks(self, split: PartitionedGraph) -> list[Executable | None] | None:
        executables: list[Executable | None] = []
        for part in split.parts:
            if not part.on_backend:
                executables.append(None)
                continue
            try:
                executables.append(self._compile_block(part.graph))
            except LoweringError as error:
                if all(node.name != error.node_name for node in part.graph.calls):
                    self._refuse_all(part, str(error))  # or this loop would not end
                self._refused[error.node_name] = error.reason
                return None
            except NotPaddedError:
                raise  # its sizes are bounds: the program would be for other ones
            except RankError:
                raise  # eager would wait for the lost process, too
            except DynamoBackendsError as error:
                self._refuse_all(part, str(error))
                return None
            except Exception as error:
                log.debug("compiling a block failed", exc_info=True)
                self._refuse_all(part, f"{type(error).__name__}: {error}")
                return None
        return executables

    def _refuse_all(self, part: GraphPart, reason: str) -> None:
        for node in part.graph.calls:
            self._refused[node.name] = reason

    def _compile_block(self, graph: Graph) -> Executable:
        ranged = has_size_expressions(graph.module.graph)
        kept = mark = fingerprint_with_plan(graph, self._plan, ranged)
        if ranged:  # what is compiled may turn out to be of these sizes alone
            mark = f"{kept} {fingerprint_with_plan(graph, self._plan)}"
        self._speed_checks[id(graph)] = self._make_speed_check(kept, "block", [graph])
        if mark not in self._compiled:
            # As it came: what XLA serializes of a loaded program lacks functions.
            came: dict[str, bytes] = {}
            executable = load_or_compile(
                self._backend,
                self._options,
                f"{kept} {size_ranges(graph, self._backend.depends_on_ranges)}",
                lambda parts: self._load(graph.copy(), parts),
                lambda: self._made(graph, kept, came),
                self._report,
                keep=lambda made: made.serves_range >= ranged,  # else it is of one size
                dump=lambda made: came or made.dump(),
            )
            self._compiled[mark] = self._options.wrap_executable(
                executable, graph, self._report.backend
            )
            self._compiled[mark].set_report(self._report)
            self._report.executables += 1
            track_executable(self._compiled[mark])
        return self._compiled[mark]

    def _made(self, graph: Graph, mark: str, came: dict[str, bytes]) -> Executable:
        backend, options, plan = self._backend, self._options, self._plan
        make = functools.partial(_compile, backend, options, plan, graph)
        with time_stage(LOWERING):
            if background.is_background_thread():
                return compiler_process.compile_in_subprocess(
                    backend, options, plan, graph, make, came
                )
            return compiler_process.compile_with_crash_journal(
                backend, options, plan, graph, mark, make, came
            )

    def _load(self, graph: Graph, parts: Mapping[str, bytes]) -> Executable:
        with time_stage(LOADING):
            executable = protocols.load_executable(self._backend, parts, graph, self._options)
        self._report.cache_hits += 1
        return executable

    def _check_fallbacks(self, split: PartitionedGraph) -> None:
        if self._options.fallback != "error":
            return
        for node, reason in split.reasons.items():
            if reason not in _BY_DESIGN and node.target is not operator.getitem:
                where = source_line(node)
                raise FallbackRefusedError(
                    f"{self._backend.name} cannot run {node.target}: {reason}"
                    + (f" (called at {where})" if where else "")
                    + '. With fallback="eager" it would run in eager.'
                )

    def _describe(self, split: PartitionedGraph) -> None:
        report = self._report
        report.fallbacks = describe_fallbacks(split, _BY_DESIGN, silent=_UNTOLD)
        report.parts = describe_parts(split, self._backend.name)
        report.reverted = self._reverted
        report.ops_in_eager = sum(f.count for f in report.fallbacks)
        compiled = sum(count_aten_calls(p.graph.calls) for p in split.parts if p.on_backend)
        by_inductor = self._backend.name != report.backend
        report.ops_on_backend = 0 if by_inductor else compiled
        report.ops_on_inductor = compiled if by_inductor else 0
        report.blocks = sum(p.on_backend for p in split.parts)
        report.log_fallbacks()

    def _assemble(
        self, split: PartitionedGraph, executables: Sequence[Executable | None]
    ) -> Program:
        graph, opened_parts = self._graph, [self._opened(part.graph) for part in split.parts]
        registers = Registers(p.name for p in graph.placeholders)
        for part in split.parts:
            registers.add(part.writes)
        reads = [
            (*map(registers.register_of, part.reads), *map(registers.register_of_size, sizes))
            for part, (_, sizes) in zip(split.parts, opened_parts, strict=True)
        ]
        outputs = [self._output(x, registers) for x in graph.outputs]
        writes = [tuple(map(registers.register_of, part.writes)) for part in split.parts]
        dead = find_dead_registers(reads, writes, outputs)
        whole = graph_name(self._report, self._backend.name if self._reverted else "")
        names = part_names(whole, [part.on_backend for part in split.parts])
        steps = [
            Instruction(
                self._runner(part, inner, executable), make_picker(read), written, dying, name
            )
            for part, (inner, _), executable, read, written, dying, name in zip(
                split.parts, opened_parts, executables, reads, writes, dead, names, strict=True
            )
        ]
        steps = [*registers.size_instructions(graph.placeholders), *steps]
        program = Program(steps, self._constants, len(registers), outputs)
        if self._whole_speed_check is not None:
            may_fall_back = self._options.fallback == "eager"
            given = len(graph.placeholders) - len(self._constants)
            sized = make_picker([i for i in graph.activations if i < given])
            program.time_whole_program(self._whole_speed_check, may_fall_back, sized)
        return program

    def _opened(self, graph: Graph) -> tuple[Graph, Sequence[SizeWithExpression]]:
        """Returns a part as eager runs it, and the sizes that it gets besides its inputs."""
        return with_sizes_as_inputs(graph) if self.serves_range else (graph, ())

    def _output(self, output: Any, registers: "Registers") -> "int | LiteralOutput":
        if isinstance(output, fx.Node):
            return registers.register_of(output.name)
        if self.serves_range and isinstance(output, SizeWithExpression | FloatWithExpression):
            return registers.register_of_size(output)
        return LiteralOutput(float(output) if isinstance(output, FloatWithExpression) else output)

    def _runner(
        self, part: GraphPart, graph: Graph, executable: Executable | None
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:
        if executable is None:
            return EagerPart(graph)
        compile_part = functools.partial(_compile, self._backend, self._options, self._plan)
        return Block(
            graph,
            executable,
            self._options.freezing,
            self._options.fallback == "eager",
            self._report,
            self._verify(executable),
            self._options.allows_reduced_precision,
            compile_part if graph is part.graph else None,
            self._speed_checks.get(id(part.graph)),
        )

    def _make_speed_check(
        self, mark: str, region: Region, graphs: Sequence[Graph]
    ) -> SpeedCheck | None:
        """Returns what measures compiled code beside eager; None: nothing does.

        Args:
            mark: Of what is compiled.
            region: What that is.
            graphs: What eager runs of it.

        Raises:
            CompileError: It is known to be slower than eager, which is to run it.
        """
        options, backend = self._options, self._backend
        if options.slow == "off" or backend.is_verified:
            return None
        why = ""
        if options.verify == "always":
            why = "every call is compared with eager"
        elif protocols.resident_device(backend, options) is not None:
            why = "its results stay on the device"
        elif getattr(options, "mesh", None) is not None:
            why = "it runs on several devices"
        key = disk_cache_key(backend, options, mark) if backend.kept is None else None
        pace = SpeedCheck(self._report, options.slow, key and speed_cache_key(key), why)
        if why or options.slow != "eager" or options.fallback != "eager":
            return pace
        known = pace.known_verdict()
        if known is None or known.outcome != "slower":
            return pace
        noted = SpeedReport(
            region, describe_operators(graphs), **dataclasses.asdict(known), replaced=True
        )
        self._report.paces.append(noted)
        total.add(slower=1)
        raise CompileError(
            f"compiled code takes {noted.describe_times}, according to an earlier measurement"
        )

    def _verify(self, executable: Executable) -> str:
        """Returns which calls of an executable are compared with eager."""
        verify = str(self._options.verify)
        known = verify == "first" and executable.was_compared
        whole = self._options.verifies_whole_graph and not self._reverted
        elsewhere = self._backend.is_verified or whole
        return "off" if known or elsewhere else verify


def _compile(backend: Backend, options: Options, plan: Plan, graph: Graph) -> Executable:
    """Compiles a copy: whatever the backend does to it, eager can fall back to the original."""
    return compile_with_plan(
        backend, options, plan, graph, lambda copy: backend.compile(copy, options)
    )


class InductorBlockBackend(Backend):
    """Backend that compiles functional ATen graphs with Inductor."""

    name = "inductor"
    summary = "torch's own compiler, for graphs with many small blocks"

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        return Availability(True, "part of torch")

    def supports(self, node: fx.Node, options: Any) -> Support:
        """See `Backend.supports`. Inductor itself leaves to eager what it has no lowering for."""
        return SUPPORTED

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        inputs = [p.meta["val"] for p in graph.placeholders]
        return UnfrozenExecutable(graph, compile_with_inductor(graph.module, inputs))


class Registers:
    """Assigns register numbers: graph inputs, then results of parts, then sizes.

    Args:
        inputs: Names of the graph's inputs.
    """

    def __init__(self, inputs: Iterable[str]):
        self._of = {name: i for i, name in enumerate(inputs)}
        self._inputs = len(self._of)
        self._sizes: dict[sympy.Expr, tuple[int, SizeWithExpression | FloatWithExpression]] = {}

    def __len__(self) -> int:
        """Counts the registers of values and of sizes."""
        return len(self._of) + len(self._sizes)

    def add(self, names: Iterable[str]) -> None:
        """Assigns registers to values; must precede `of_size`."""
        for name in names:
            self._of.setdefault(name, len(self._of))

    def register_of(self, name: str) -> int:
        """Returns the register number of a value by node name."""
        return self._of[name]

    def register_of_size(self, size: SizeWithExpression | FloatWithExpression) -> int:
        """Returns the register number of a dynamic size, assigning it on first use."""
        return self._sizes.setdefault(size.expression, (len(self), size))[0]

    def size_instructions(self, places: Sequence[fx.Node]) -> Iterator[Instruction]:
        """Yields the instruction that computes dynamic sizes; none if all are static.

        Args:
            places: The graph's inputs.

        Raises:
            CompileError: A size does not follow from the inputs' shapes.
        """
        if self._sizes:
            numbers = tuple(number for number, _ in self._sizes.values())
            read = SizeReader(places, [size for _, size in self._sizes.values()])
            yield Instruction(read, make_picker(range(self._inputs)), numbers, ())


def find_dead_registers(
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    outputs: Sequence[int | LiteralOutput],
) -> list[tuple[int, ...]]:
    """Returns for each part the registers that no later part reads.

    Args:
        reads: Reads of each part.
        writes: Writes of each part.
        outputs: Outputs of the graph.
    """
    last: dict[int, int] = {}
    for i, (read, written) in enumerate(zip(reads, writes, strict=True)):
        last.update(dict.fromkeys((*read, *written), i))
    kept = {x for x in outputs if isinstance(x, int)}
    return [
        tuple(r for r, at in last.items() if at == i and r not in kept) for i in range(len(reads))
    ]
