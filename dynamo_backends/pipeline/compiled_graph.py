"""Chooses or compiles the program for each call's shapes of a functional graph."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, fx

from dynamo_backends._torch_private import disable_current_modes, dynamo_control, generated_forward
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.eager_calls import make_eager_module
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.index_checks import IndexCheckedGraph
from dynamo_backends.graph.normalize import NormalizedGraph
from dynamo_backends.graph.seeded_draws import replace_draws_by_seeded
from dynamo_backends.graph.specialize import (
    computes_with_sizes,
    is_dynamic,
    make_example_inputs,
    shape_key,
    specialize,
)
from dynamo_backends.interface import counters, protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.counters import total
from dynamo_backends.interface.errors import suppress_and_log
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.publishing import log_structured_trace, publish
from dynamo_backends.interface.report import Compilation, GraphReport, ServedCalls
from dynamo_backends.interface.stance import compiles_nothing
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.program_builder import ProgramBuilder
from dynamo_backends.pipeline.reporting import describe_shapes, report_uncompiled
from dynamo_backends.pipeline.shapes.buckets import named_bounds
from dynamo_backends.pipeline.shapes.padded_programs import PaddedDispatch, PaddedPrograms
from dynamo_backends.pipeline.shapes.ranged_programs import RangedPrograms
from dynamo_backends.pipeline.shapes.shared_programs import (
    FunctionCapture,
    SharedPrograms,
    SuccessorProgram,
)
from dynamo_backends.pipeline.shapes.strategy import (
    CompiledCallable,
    ExactPrograms,
    ProgramRequest,
    ShapeStrategy,
)
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.runtime.program import Program

log = logging.getLogger("dynamo_backends")


def fall_back_to_eager(
    eager: Callable[..., Any],
    module: fx.GraphModule,
    report: GraphReport,
    options: Options,
    error: Exception,
    stage: str,
) -> Callable[..., Any]:
    """Reports a failed compilation and returns the eager function; may raise."""
    EagerSwitch(eager, [report], "graph", options.fallback == "eager").switch_uncompiled(
        error, stage
    )
    with suppress_and_log(report, "describing a graph"):
        report_uncompiled(report, module.graph)
        report.log_fallbacks()
    return eager


TRAINED = "gradients are computed for it"
"""A small transformer that was trained on padded texts ran at 0.65 times eager's speed."""

ServedBy = Literal["ranged", "padded", "exact"]


def _served_by(serves_range: bool, padded: bool) -> ServedBy:
    if not serves_range:
        return "exact"
    return "padded" if padded else "ranged"


@dataclasses.dataclass
class EagerGraph:
    """Runs a functional graph in eager and counts its calls.

    Attributes:
        module: The graph.
        constants: Values of its last placeholders.
        served: How often a graph with symbols was served by it.
    """

    module: fx.GraphModule
    constants: Sequence[Tensor] = ()
    served: ServedCalls = dataclasses.field(default_factory=lambda: ServedCalls("eager", ()))

    def __post_init__(self) -> None:
        """Takes kernels that are called with other strides than were promised."""
        self.module = make_eager_module(self.module)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        values = [*args, *self.constants]
        args.clear()
        total.add(eager_calls=1)
        results: Sequence[Any] = generated_forward(self.module)(*values)
        return results


@dataclasses.dataclass
class FailedProgram:
    """Raises a compilation's error at each call where eager must not replace it."""

    error: Exception
    served: ServedCalls = dataclasses.field(default_factory=lambda: ServedCalls("eager", ()))

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Raises the error; clears the list of arguments."""
        args.clear()
        raise self.error.with_traceback(None)  # else it grows with each call


class CompiledGraph:
    """A functional graph that is compiled for each new set of input shapes.

    A graph with static shapes is compiled at once, one with symbolic shapes at its first calls.
    Under `run()` what is not compiled yet runs in eager. With `while_compiling="eager"` all is
    compiled beside the calls, which run in eager meanwhile.

    Args:
        backend: What compiles it.
        normalized: The graph.
        options: Options of the backend.
        report: Gets what became of it.
        symbols: See `CaptureFacts.symbols`.

    Attributes:
        report: Report of the graph.
        ranged: Its programs that serve ranges.
        checks: What its caller checks of each call.
    """

    checks: IndexCheckedGraph | None = None

    def __init__(
        self,
        backend: Backend,
        normalized: NormalizedGraph,
        options: Options,
        report: GraphReport,
        symbols: Mapping[str, Sequence[str]],
    ):
        self.report = report
        self.report.executable = self
        self._backend = backend
        self._graph = normalized.graph
        self._constants = normalized.constants
        self._options = options
        self._eager = EagerGraph(normalized.graph.module, normalized.constants)
        waiting = ServedCalls("eager while compiling", ())
        self._meanwhile = EagerGraph(normalized.graph.module, normalized.constants, waiting)
        self._lock = fork_safe_lock()
        self._static: CompiledCallable | None = None
        self._is_static = not is_dynamic(self._graph)
        serves_ranges = backend.serves_ranges or not computes_with_sizes(self._graph)
        self._is_ranged = serves_ranges and options.ranges
        self._exact = ExactPrograms(options, report)
        self.ranged = RangedPrograms(self._graph, options.max_executables)
        function = dynamo_control.compiled_function()
        capture = FunctionCapture(function, backend.name, options, self._graph, self._constants)
        self._shared = SharedPrograms(self, capture, self._is_ranged, backend.depends_on_ranges)
        self._padded = self._padded_programs(symbols)
        self._strategies = self._applicable()
        self._is_published = False
        self._served: list[ServedCalls] = []  # of each program, also of those that have left
        if self._is_static and not options.compiles_in_background and not compiles_nothing():
            # AOT Autograd's fake tensors are not the ones that backends make.
            with disable_current_modes():
                self._static = self._compile(ProgramRequest((), (), self._graph.copy))
        publish(report)
        self._is_published = True

    def _applicable(self) -> tuple[ShapeStrategy, ...]:
        """Returns what may serve sizes without a program of their own, in the order of asking."""
        if self._is_static:
            return ()
        ranged = (self.ranged,) if self._is_ranged else ()
        padded = () if self._padded is None else (self._padded,)
        return (*ranged, self._shared, *padded)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        static = self._static
        if static is not None:
            return static(args)
        compiled = self.ranged.proven
        if compiled is None:
            compiled = self._program(args)
        compiled.served.calls += 1
        return compiled(args)

    @property
    def may_compile_in_background(self) -> bool:
        """Whether background compilation may happen during its calls."""
        return self._options.compiles_in_background or self._padded is not None

    @property
    def static_program(self) -> Any:
        """The program of a static graph; None for dynamic or handed-over graphs.

        None also if the program of a graph with symbols has taken its calls.
        """
        return None if isinstance(self._static, SuccessorProgram) else self._static

    @property
    def only_program(self) -> Any:
        """The program that is valid for all sizes; None if there is none yet."""
        return self.static_program if self._is_static else self.ranged.proven

    def replace_static_program(self, successor: SuccessorProgram) -> None:
        """Replaces a static graph's own program by a dynamic graph's program."""
        if isinstance(self._static, Program):
            self._static = successor
            self._exact.clear()

    @property
    def served(self) -> tuple[ServedCalls, ...]:
        """The calls that each program of a dynamic graph served; empty if static."""
        programs = [] if self._is_static else self._served
        eager = [x for x in (self._meanwhile.served, self._eager.served) if x.calls]
        return tuple(map(dataclasses.replace, [*programs, *eager]))

    def _program(self, args: list[Any]) -> CompiledCallable:
        key = shape_key(args)
        program = self._known(key)
        if isinstance(program, PaddedDispatch):
            if program.exceeds_padding_budget and not compiles_nothing():
                self._submit(key, args)
            is_eager_better = (
                self._options.compiles_in_background and program.awaits_narrower_program
            )
            return self._meanwhile if is_eager_better else program
        if program is None and compiles_nothing():
            padded = self._padded and self._padded.find_compiled([*args, *self._constants])
            return padded or self._eager
        if program is None and self._is_churning:
            return self._eager
        if (
            program is None
            and self._options.compiles_in_background
            and not background.is_background_thread()
        ):
            self._submit(key, args)
            return self._meanwhile
        if program is None:
            with self._lock, disable_current_modes():
                program = self._known(key)
                if program is None:
                    program = self._for_sizes(key, [*args, *self._constants])
                    self._keep(key, program)
        return program

    def _known(self, key: tuple[Any, ...]) -> CompiledCallable | None:
        """Returns what ran calls of these sizes before."""
        program = self._exact.get(key)
        if program is None and self._padded is not None:
            program = self._padded.counted.get(key)
        return program

    @property
    def _is_churning(self) -> bool:
        is_padded = self._padded is not None and not self._padded.reason
        return self._exact.is_churning and not is_padded

    def _submit(self, key: tuple[Any, ...], args: Sequence[Any]) -> None:
        values = make_example_inputs(self._graph, [*args, *self._constants])
        background.submit_compilation(
            key, lambda graph: graph._compile_beside(key, values), owner=self
        )

    def _compile_beside(self, key: tuple[Any, ...], values: Sequence[Any]) -> None:
        """Compiles, and prepares the weights, in another thread than that of the calls."""
        program: CompiledCallable
        with disable_current_modes():
            try:
                program = self._for_sizes(key, values)
                made = program.program if isinstance(program, PaddedDispatch) else program
                if isinstance(made, Program):
                    made.bind_weights_ahead(values)
            except Exception as error:
                program = FailedProgram(error)
        if self._is_static:
            self._static = program
        self._keep(key, program)

    def _keep(self, key: tuple[Any, ...], program: CompiledCallable) -> None:
        if isinstance(program, PaddedDispatch):
            return
        if self._padded is not None:
            self._padded.note_exact_program(key)
        self._exact.put(key, program)

    def _for_sizes(self, key: tuple[Any, ...], values: Sequence[Any]) -> CompiledCallable:
        """Returns what runs calls of new sizes."""
        with counters.use_stage_clock(counters.StageClock(self.report.stage_seconds)):
            make = functools.partial(specialize, self._graph, values, self._is_ranged)
            return self._compile(ProgramRequest(key, values, make))

    def _compile(self, request: ProgramRequest) -> CompiledCallable:
        """Returns the program of the first strategy that has one, or a new one; else eager."""
        try:
            for strategy in self._strategies:
                program = strategy.find(request)
                if program is not None:
                    return program
            return self._built(request.graph)
        except Exception as error:
            module, what = self._graph.module, "compiling the graph"
            fall_back_to_eager(self._eager, module, self.report, self._options, error, what)
            return self._eager

    def _padded_programs(self, symbols: Mapping[str, Sequence[str]]) -> PaddedPrograms | None:
        options = self._options
        rule = protocols.buckets(self._backend, options) if options.ranges else None
        if rule is None or not computes_with_sizes(self._graph):
            return None
        if self._graph.kind != "inference":
            self.report.exact = TRAINED
            return None
        named = named_bounds(rule.named, symbols)
        most, build = options.max_executables, self._build_padded
        return PaddedPrograms(self._graph, rule, named, most, build, self.report)

    def _build_padded(self, graph: Graph) -> Program | None:
        program, serves_range = self._build(graph, padded=True)
        return program if serves_range else None

    def adopt_program(
        self,
        program: Program,
        report: GraphReport,
        by: Literal["ranged", "exact"],
        shapes: tuple[str, ...],
        start: float,
    ) -> ServedCalls:
        """See `shared_programs.ProgramOwner.adopt_program`."""
        if not self._served:
            self.report.copy_description(report)
        program.add_report(self.report)
        made = self._record(shapes, (self.report.executables, self.report.cache_hits), start)
        served = ServedCalls(by, shapes, 0, 0, made.seconds)
        self._served.append(served)
        return served

    def _built(self, graph: Graph) -> Program:
        program, serves_range = self._build(graph)
        if serves_range:
            self.ranged.add(program, graph)
        if self._is_ranged or self._is_static:
            with suppress_and_log(self.report, "replacing the program of the first sizes"):
                self._shared.note_compiled(graph, serves_range)
        return program

    def _build(self, graph: Graph, padded: bool = False) -> tuple[Program, bool]:
        """Returns a program, and whether it serves a range of sizes."""
        start = time.perf_counter()
        before = self.report.executables, self.report.cache_hits
        if (
            protocols.resident_device(self._backend, self._options) is not None
        ):  # masks would have to go there
            graph = graph.copy()
            replace_draws_by_seeded(graph)
        builder = ProgramBuilder(self._backend, graph, self._constants, self._options, self.report)
        program = builder.build()
        shapes: tuple[str, ...] = ()
        with suppress_and_log(self.report, "describing the inputs"):
            shapes = describe_shapes(graph, self.report.inputs, builder.serves_range, padded)
        with suppress_and_log(self.report, "describing a compilation"):
            made = self._record(shapes, before, start)
            program.served = ServedCalls(
                _served_by(builder.serves_range, padded), shapes, 0, made.executables, made.seconds
            )
            self._served.append(program.served)
        if self._is_published:
            log_structured_trace(self.report, "graph" if self._is_static else "sizes")
        return program, builder.serves_range

    def _record(
        self, shapes: tuple[str, ...], before: tuple[int, int], start: float
    ) -> Compilation:
        report, seconds = self.report, time.perf_counter() - start
        executables, hits = report.executables - before[0], report.cache_hits - before[1]
        made = Compilation(shapes, executables, hits, seconds)
        report.note_compilation(made)
        return made
