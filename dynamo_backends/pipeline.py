"""The way of a captured graph: AOT Autograd, normal form, partition, backend, program."""

import dataclasses
import hashlib
import itertools
import logging
import operator
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import report as reporting
from dynamo_backends._torch_private import OpOverload, disable_current_modes
from dynamo_backends.aot.autograd import compile_functional
from dynamo_backends.aot.inputs import (
    Captured,
    describe_inputs,
    inspect_captured,
    subclass_inputs,
    without_subclasses,
)
from dynamo_backends.backend import Backend, Executable, Options, Support
from dynamo_backends.cudagraphs.wrapper import require_device, with_cudagraphs
from dynamo_backends.description import describe_fallbacks, describe_parts, describe_shapes
from dynamo_backends.errors import (
    BackendUnavailableError,
    CompileError,
    DynamoBackendsError,
    FallbackRefusedError,
    LoweringError,
    SaveError,
    UnknownBackendError,
    VerificationError,
)
from dynamo_backends.graph.aliasing import is_replayed
from dynamo_backends.graph.cache import DiskCache, cache_folder, source_digest
from dynamo_backends.graph.decompositions import decompositions
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.fragments import fragmentation
from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.graph.normalize import Normalized, normalize
from dynamo_backends.graph.operator_names import is_named
from dynamo_backends.graph.partition import Part, Partition, count_ops, partition
from dynamo_backends.graph.random import is_random
from dynamo_backends.graph.sequence import PASSES
from dynamo_backends.graph.specialize import is_dynamic, shape_key, specialize
from dynamo_backends.inductor.blocks import InductorBlocks
from dynamo_backends.program import Block, Literal, Program, Step, pick
from dynamo_backends.registry import get_backend
from dynamo_backends.report import Compilation, GraphReport, Kind
from dynamo_backends.stance import compiles_nothing
from dynamo_backends.verify import run_verified

_captures = itertools.count(1)

log = logging.getLogger("dynamo_backends")

DRAWN_BY_TORCH = "random numbers are drawn by torch, so that they equal eager's"
VIEW_OF_OUTPUT = "it is a view of another output"
KEPT_BY_OPTION = "the option keep_in_eager names it"
FRAGMENTS = "the graph fell into fragments"
_AT_THE_EDGES = frozenset({DRAWN_BY_TORCH, VIEW_OF_OUTPUT})  # these do not split a graph
_BY_DESIGN = _AT_THE_EDGES | {KEPT_BY_OPTION}


def compile_captured(
    backend: Backend,
    captured: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
) -> Callable[..., Any]:
    """Compiles what Dynamo captured.

    Args:
        backend: What compiles the graphs.
        captured: Dynamo's torch-level graph.
        example_inputs: Its inputs, real tensors.
        options: An instance of `backend.Options`.

    Returns:
        A function with the calling convention of `captured`.

    Raises:
        BackendUnavailableError: The backend cannot run here.
        FallbackRefusedError: With `fallback="error"`, if anything would run in eager.
    """
    require_available(backend)
    number = next(_captures)
    taken = backend.take(captured, example_inputs, options, number)
    if taken is not None:
        return taken
    compile_graph = _GraphCompiler(backend, options, inspect_captured(captured), number)
    table = decompositions(keep=frozenset(backend.keeps(options)))
    places = subclass_inputs(example_inputs)
    compiled = compile_functional(
        captured, example_inputs, compile_graph, table, options.partitioner, complete=not places
    )
    return without_subclasses(compiled, places) if places else compiled


@dataclasses.dataclass(frozen=True)
class _GraphCompiler:
    """Compiles the functional graphs of one captured graph.

    Its pickle is for a process that loads what was compiled instead of capturing it anew.
    """

    backend: Backend
    options: Options
    facts: Captured
    number: int

    def __call__(self, gm: fx.GraphModule, kind: Kind, static: frozenset[int]) -> "CompiledGraph":
        backend, options = self.backend, self.options
        normalized = normalize(gm, kind, freeze=options.freezing != "off", static=static)
        backend.prepare(normalized.graph, options)
        require_device(normalized.graph, options, backend.name)
        report = GraphReport(backend.name, kind, self.number)
        report.inputs = describe_inputs(normalized.graph, self.facts, options)
        report.output_aliases = self.facts.output_aliases if kind != "backward" else ()
        return CompiledGraph(backend, normalized, options, report)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            found = get_backend(self.backend.name)
        except UnknownBackendError as error:
            raise pickle.PicklingError(f"{error} See register_backend.") from error
        if found is not self.backend:
            raise pickle.PicklingError(f"{self.backend.name!r} is the name of another backend")
        return _graph_compiler, (source_digest(), self.backend.name, self.options, self.facts)


def _graph_compiler(version: str, name: str, options: Options, facts: Captured) -> _GraphCompiler:
    if version != source_digest():
        raise SaveError(
            "this graph was kept by another version of dynamo_backends, which may have traced it "
            "differently. Compile it anew."
        )
    backend = get_backend(name)
    require_available(backend)
    return _GraphCompiler(backend, options, facts, next(_captures))


def require_available(backend: Backend) -> None:
    """Raises `BackendUnavailableError` if the backend cannot run here."""
    available = backend.availability()
    if not available.usable:
        remedy = f" To mend it: {available.remedy}" if available.remedy else ""
        raise BackendUnavailableError(
            f"backend {backend.name!r} cannot run here: {available.reason}.{remedy}"
        )


class CompiledGraph:
    """One functional graph; compiles it for every set of shapes that it meets.

    A graph with static shapes is compiled at once, one with symbolic shapes at its first calls.
    Under `run()` what is not compiled yet runs in eager.
    """

    def __init__(
        self, backend: Backend, normalized: Normalized, options: Options, report: GraphReport
    ):
        self.report = report
        self.report.executable = self
        self._backend = backend
        self._graph = normalized.graph
        self._constants = normalized.constants
        self._options = options
        self._lock = threading.Lock()
        self._programs: OrderedDict[tuple[Any, ...], Callable[..., Any]] = OrderedDict()
        self._static: Callable[[list[Any]], Sequence[Any]] | None = None
        self._count = len(self._graph.inputs) - len(self._constants)
        if not is_dynamic(self._graph) and not compiles_nothing():
            # AOT Autograd's fake tensors are not the ones that backends make.
            with disable_current_modes():
                self._static = self._compile(self._graph)
        reporting.publish(self.report)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        if self._static is not None:
            return self._static(args)
        return self._program(args)(args)

    @property
    def static_program(self) -> Any:
        """The program of a graph with static shapes; None if its shapes are symbolic."""
        return self._static

    def _program(self, args: list[Any]) -> Callable[[list[Any]], Sequence[Any]]:
        key = shape_key(self._graph, args)
        program = self._programs.get(key)
        if program is None and compiles_nothing():
            return self._run_in_eager
        if program is None:
            with self._lock, disable_current_modes():
                program = self._programs.get(key)
                if program is None:
                    values = [*args, *self._constants]
                    graph = specialize(self._graph, values, self._backend.serves_ranges)
                    program = self._programs[key] = self._compile(graph)
                    while len(self._programs) > self._options.max_executables:
                        self._programs.popitem(last=False)
        return program

    def _run_in_eager(self, args: list[Any]) -> Sequence[Any]:
        values = [*args, *self._constants]
        args.clear()
        results: Sequence[Any] = self._graph.module(*values)
        return results

    def _compile(self, graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
        start = time.perf_counter()
        shapes = describe_shapes(graph, self.report.inputs)
        before = self.report.executables, self.report.cache_hits
        PASSES(graph)
        builder = _ProgramBuilder(self._backend, graph, self._constants, self._options, self.report)
        program = builder.build()
        self._record(shapes, before, time.perf_counter() - start)
        if self._options.verify:
            return _Verified(program, graph, self._constants, self._options, self.report)
        return program

    def _record(self, shapes: tuple[str, ...], before: tuple[int, int], seconds: float) -> None:
        report = self.report
        report.compile_seconds += seconds
        executables, hits = report.executables - before[0], report.cache_hits - before[1]
        report.compilations.append(Compilation(shapes, executables, hits, seconds))


def build_program(backend: Backend, graph: Graph, options: Options, report: GraphReport) -> Program:
    """Partitions a graph and compiles its blocks.

    Args:
        backend: What compiles them.
        graph: With static shapes, after all passes.
        options: Of the backend.
        report: Gets what became of the graph.

    Raises:
        FallbackRefusedError: With `fallback="error"`, if anything would run in eager.
    """
    return _ProgramBuilder(backend, graph, (), options, report).build()


class _ProgramBuilder:
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
        self._refused: dict[str, str] = {}
        self._compiled: dict[str, Executable] = {}
        self._reverted = ""

    def build(self) -> Program:
        """Partitions and compiles, until every block compiles."""
        while True:
            split = self._split()
            self._check_fallbacks(split)
            executables = self._compile_blocks(split)
            if executables is not None:
                break
        self._describe(split)
        return self._assemble(split, executables)

    def _split(self) -> Partition:
        options = self._options
        # With fallback="error" only what the user named runs in eager, so no block is too small.
        strict = options.fallback == "error"
        minimum = 1 if strict else options.min_block_size
        split = partition(self._graph, self._supports, minimum, _AT_THE_EDGES)
        if strict or options.fragmented == "keep" or self._reverted:
            return split
        reason = fragmentation(split)
        if reason is None:
            return split
        return self._revert(split, reason)

    def _revert(self, split: Partition, reason: str) -> Partition:
        where = "Inductor" if self._options.fragmented == "inductor" else "eager"
        self._reverted = f"{reason}; the graph runs in {where} instead"
        if where == "eager":
            self._refused = {n.name: split.reasons.get(n, FRAGMENTS) for n in self._graph.calls}
        else:
            self._backend = InductorBlocks()
            self._compiled.clear()
        return self._split()

    def _supports(self, node: fx.Node) -> Support:
        if node.name in self._refused:
            return Support(False, self._refused[node.name])
        if is_replayed(node):
            return Support(False, VIEW_OF_OUTPUT)
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self._supports(node.args[0])
        if is_random(node):
            return Support(False, DRAWN_BY_TORCH)
        if not isinstance(node.target, OpOverload):
            return Support(False, "it is not an ATen operator")
        if is_named(node, self._options.keep_in_eager):
            return Support(False, KEPT_BY_OPTION)
        return self._backend.supports(node, self._options)

    def _compile_blocks(self, split: Partition) -> list[Executable | None] | None:
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
            except DynamoBackendsError as error:
                self._refuse_all(part, str(error))
                return None
            except Exception as error:
                log.debug("compiling a block failed", exc_info=True)
                self._refuse_all(part, f"{type(error).__name__}: {error}")
                return None
        return executables

    def _refuse_all(self, part: Part, reason: str) -> None:
        for node in part.graph.calls:
            self._refused[node.name] = reason

    def _compile_block(self, graph: Graph) -> Executable:
        mark = fingerprint(graph)
        if mark not in self._compiled:
            # A copy: whatever the backend does to it, eager can fall back to the original.
            self._compiled[mark] = with_cudagraphs(
                self._load(mark, graph.copy()), graph, self._options, self._report.backend
            )
            self._compiled[mark].report_to(self._report)
            self._report.executables += 1
        return self._compiled[mark]

    def _load(self, mark: str, graph: Graph) -> Executable:
        versions = self._backend.cache_key(self._options) if self._options.cache else None
        if versions is None:
            return self._backend.compile(graph, self._options)
        settings = dataclasses.asdict(self._options)
        text = f"{mark} {self._backend.name} {versions} {torch.__version__} {settings}"
        key = hashlib.sha256(text.encode()).hexdigest()
        cache = DiskCache(cache_folder())
        parts = cache.get(key)
        if parts is not None:
            try:
                executable = self._backend.load(parts, graph, self._options)
                self._report.cache_hits += 1
                return executable
            except CompileError as error:
                log.warning("dropped an unusable cache entry: %s", error)
                cache.drop(key)
        executable = self._backend.compile(graph, self._options)
        dumped = executable.dump()
        if dumped is not None:
            cache.put(key, dumped)
        return executable

    def _check_fallbacks(self, split: Partition) -> None:
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

    def _describe(self, split: Partition) -> None:
        report = self._report
        report.fallbacks = describe_fallbacks(split, _BY_DESIGN, silent={VIEW_OF_OUTPUT})
        report.parts = describe_parts(split, self._backend.name)
        report.reverted = self._reverted
        report.ops_in_eager = sum(f.count for f in report.fallbacks)
        compiled = sum(count_ops(p.graph.calls) for p in split.parts if p.on_backend)
        by_inductor = self._backend.name != report.backend
        report.ops_on_backend = 0 if by_inductor else compiled
        report.ops_on_inductor = compiled if by_inductor else 0
        report.blocks = sum(p.on_backend for p in split.parts)
        report.log_fallbacks()

    def _assemble(self, split: Partition, executables: Sequence[Executable | None]) -> Program:
        names = [p.name for p in self._graph.placeholders]
        registers = {name: i for i, name in enumerate(names)}
        for part in split.parts:
            for name in part.writes:
                registers.setdefault(name, len(registers))
        outputs: list[int | Literal] = [
            registers[x.name] if isinstance(x, fx.Node) else Literal(x) for x in self._graph.outputs
        ]
        last_use: dict[str, int] = {}
        for i, part in enumerate(split.parts):
            last_use.update(dict.fromkeys((*part.reads, *part.writes), i))
        kept = {x.name for x in self._graph.outputs if isinstance(x, fx.Node)}
        steps = []
        for i, (part, executable) in enumerate(zip(split.parts, executables, strict=True)):
            dead = [registers[n] for n, at in last_use.items() if at == i and n not in kept]
            steps.append(
                Step(
                    self._runner(part, executable),
                    pick([registers[n] for n in part.reads]),
                    tuple(registers[n] for n in part.writes),
                    tuple(dead),
                )
            )
        return Program(steps, self._constants, len(registers), outputs)

    def _runner(
        self, part: Part, executable: Executable | None
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:
        if executable is None:
            module = part.graph.module
            return lambda values: module(*values)
        return Block(
            part.graph,
            executable,
            self._options.freezing,
            self._options.fallback == "eager",
            self._report,
        )


class _Verified:
    """Compares the first call with eager; a program that is wrong is replaced."""

    def __init__(
        self,
        program: Program,
        graph: Graph,
        constants: Sequence[Tensor],
        options: Options,
        report: GraphReport,
    ):
        self._program = program
        self._module = graph.module
        self._constants = constants
        self._refuse = options.fallback == "error"
        self._report = report
        self._verdict: str | None = ""

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._verdict is None:
            return self._program(args)
        full = [*args, *self._constants]
        if self._verdict:
            args.clear()
            return self._module(*full)
        run = lambda values: self._program(values[: len(args)])  # noqa: E731
        results, expected, self._verdict = run_verified(run, self._module, full)
        args.clear()
        if self._verdict is None:
            return results
        text = f"{self._report.backend} computed a wrong result: {self._verdict}"
        if self._refuse:
            raise VerificationError(text)
        log.warning("%s; the graph runs in eager from now on", text)
        self._report.runtime_fallbacks.append(text)
        return expected
