"""One functional graph: which program serves which sizes, and what runs while there is none."""

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, fx

from dynamo_backends._torch_private import control, disable_current_modes
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.eager_calls import for_eager
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.normalize import Normalized
from dynamo_backends.graph.position_checks import PositionChecks
from dynamo_backends.graph.seeded_draws import seed_draws
from dynamo_backends.graph.sequence import PASSES
from dynamo_backends.graph.specialize import (
    Symbols,
    computes_with_sizes,
    is_dynamic,
    shape_key,
    specialize,
    stand_ins,
)
from dynamo_backends.interface import protocols, stages
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.containment import done_without
from dynamo_backends.interface.counters import total
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.publishing import publish, trace
from dynamo_backends.interface.report import Compilation, GraphReport, Served
from dynamo_backends.interface.stance import compiles_nothing
from dynamo_backends.pipeline import background, succession
from dynamo_backends.pipeline.blocks import ProgramBuilder
from dynamo_backends.pipeline.bounds import named_bounds
from dynamo_backends.pipeline.buckets import Counted, PaddedPrograms
from dynamo_backends.pipeline.description import describe_shapes, describe_uncompiled
from dynamo_backends.pipeline.distinct import with_distinct_sizes
from dynamo_backends.pipeline.frequent import FrequentSizes
from dynamo_backends.pipeline.ranges import Compiled, RangedPrograms
from dynamo_backends.pipeline.succession import Capture, OfFirstSizes, Shared, Successor
from dynamo_backends.runtime import arena
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.runtime.lru import LRU
from dynamo_backends.runtime.program import Program

log = logging.getLogger("dynamo_backends")


def in_eager(
    eager: Callable[..., Any],
    module: fx.GraphModule,
    report: GraphReport,
    options: Options,
    error: Exception,
    stage: str,
) -> Callable[..., Any]:
    """Eager in place of a graph that could not be compiled (see `EagerSwitch.uncompiled`)."""
    EagerSwitch(eager, [report], "graph", options.fallback == "eager").uncompiled(error, stage)
    with done_without(report, "describing a graph"):
        describe_uncompiled(report, module.graph)
        report.log_fallbacks()
    return eager


ServedBy = Literal["ranged", "padded", "exact"]


def _served_by(serves_range: bool, padded: bool) -> ServedBy:
    if not serves_range:
        return "exact"
    return "padded" if padded else "ranged"


@dataclasses.dataclass
class InEager:
    """A functional graph of which nothing was compiled.

    Attributes:
        module: The graph.
        constants: Values of its last placeholders.
        served: How often a graph with symbols was served by it.
    """

    module: fx.GraphModule
    constants: Sequence[Tensor] = ()
    served: Served = dataclasses.field(default_factory=lambda: Served("eager", ()))

    def __post_init__(self) -> None:
        """Takes kernels that are called with other strides than were promised."""
        self.module = for_eager(self.module)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        values = [*args, *self.constants]
        args.clear()
        total.add(eager_calls=1)
        results: Sequence[Any] = self.module.forward(*values)  # a call would print errors
        return results


@dataclasses.dataclass
class Raising:
    """In place of a program that must not be replaced by eager: each call says why."""

    error: Exception
    served: Served = dataclasses.field(default_factory=lambda: Served("eager", ()))

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Raises the error; clears the list of arguments."""
        args.clear()
        raise self.error.with_traceback(None)  # else it grows with each call


class CompiledGraph:
    """One functional graph; compiles it for every set of shapes that it meets.

    A graph with static shapes is compiled at once, one with symbolic shapes at its first calls.
    Under `run()` what is not compiled yet runs in eager. With `while_compiling="eager"` all is
    compiled beside the calls, which run in eager meanwhile.

    Args:
        backend: What compiles it.
        normalized: The graph.
        options: Of the backend.
        report: Gets what became of it.
        symbols: See `CaptureFacts.symbols`.

    Attributes:
        report: Of the graph.
        ranged: Its programs that serve ranges.
        checks: What its caller checks of each call.
    """

    checks: PositionChecks | None = None

    def __init__(
        self,
        backend: Backend,
        normalized: Normalized,
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
        self._eager = InEager(normalized.graph.module, normalized.constants)
        self._lock = fork_safe_lock()
        self._programs: LRU[tuple[Any, ...], Compiled] = LRU(options.max_executables)
        self.ranged = RangedPrograms(options.max_executables, self._with_distinct_sizes)
        self._padded = self._padded_programs(symbols)
        self._counted = self._padded.counted if self._padded is not None else LRU(1)
        self._displaced = 0  # programs of one set of sizes that made room for others
        self._static: Compiled | None = None
        self._is_static = not is_dynamic(self._graph)
        serves_ranges = backend.serves_ranges or not computes_with_sizes(self._graph)
        self._is_ranged = serves_ranges and options.ranges
        self._frequent = self._frequent_sizes()
        waiting = Served("eager while compiling", ())
        self._meanwhile = InEager(normalized.graph.module, normalized.constants, waiting)
        self._is_published = False
        self._served: list[Served] = []  # of each program, also of those that have left
        function = control.compiled_function()
        self._capture = Capture(function, backend.name, options, self._graph, self._constants)
        if self._is_static and not options.is_beside and not compiles_nothing():
            # AOT Autograd's fake tensors are not the ones that backends make.
            with disable_current_modes():
                self._static = self._compile(self._graph.copy)
        publish(report)
        self._is_published = True

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        static = self._static
        if static is not None:
            return static(args)
        compiled = self.ranged.proven
        if compiled is None:
            compiled = self._program(args)
        elif self._frequent is not None:
            compiled = self._frequent.choose(compiled, args)
        compiled.served.calls += 1
        return compiled(args)

    @property
    def compiles_beside(self) -> bool:
        """Whether anything of it may be compiled while it is called."""
        beside = self._padded, self._frequent
        return self._options.is_beside or any(x is not None for x in beside)

    @property
    def static_program(self) -> Any:
        """The program of a graph with static shapes; None if its shapes are symbolic.

        None also if the program of a graph with symbols has taken its calls.
        """
        return None if isinstance(self._static, Successor) else self._static

    @property
    def only_program(self) -> Any:
        """The program for all sizes that the graph may have; None: there is none, or not yet."""
        return self.static_program if self._is_static else self.ranged.proven

    def hand_over(self, successor: Successor) -> None:
        """Has another program run a graph with static shapes, if one of its own does so far."""
        if isinstance(self._static, Program):
            self._static = successor
            self._programs.clear()

    @property
    def served(self) -> tuple[Served, ...]:
        """What has served the calls so far; calls of a static graph's program are not counted."""
        programs = [] if self._is_static else self._served
        eager = [x for x in (self._meanwhile.served, self._eager.served) if x.calls]
        return tuple(map(dataclasses.replace, [*programs, *eager]))

    def _program(self, args: list[Any]) -> Compiled:
        key = shape_key(args)
        program = self._programs.get(key) or self._counted.get(key)
        if isinstance(program, Counted):
            if program.is_spent and not compiles_nothing():
                self._submit(key, args)
            is_eager_better = self._options.is_beside and program.is_provisional
            return self._meanwhile if is_eager_better else program
        if program is None and compiles_nothing():
            padded = self._padded and self._padded.existing([*args, *self._constants])
            return padded or self._eager
        if program is None and self._is_churning:
            return self._eager
        if program is None and self._options.is_beside and not background.is_beside():
            self._submit(key, args)
            return self._meanwhile
        if program is None:
            with self._lock, disable_current_modes():
                program = self._programs.get(key) or self._counted.get(key)
                if program is None:
                    program = self._for_sizes(key, [*args, *self._constants])
                    self._keep(key, program)
        return program

    def _submit(self, key: tuple[Any, ...], args: Sequence[Any]) -> None:
        values = stand_ins(self._graph, [*args, *self._constants])
        background.submit(key, lambda graph: graph._compile_beside(key, values), owner=self)

    def _compile_beside(self, key: tuple[Any, ...], values: Sequence[Any]) -> None:
        """Compiles, and prepares the weights, in another thread than that of the calls."""
        program: Compiled
        with disable_current_modes():
            try:
                program = self._for_sizes(key, values)
                made = program.program if isinstance(program, Counted) else program
                if isinstance(made, Program):
                    made.prepare(values)
            except Exception as error:
                program = Raising(error)
        if self._is_static:
            self._static = program
        self._keep(key, program)

    def _keep(self, key: tuple[Any, ...], program: Compiled) -> None:
        if isinstance(program, Counted):
            return
        if self._padded is not None:
            self._padded.replaced(key)
        if len(self._programs) >= self._options.max_executables and program.served.by == "exact":
            self._displaced += 1
            self._note_churning()
        self._programs.put(key, program)

    @property
    def _is_churning(self) -> bool:
        """Whether there are so many sizes that programs leave before they have paid."""
        is_padded = self._padded is not None and not self._padded.reason
        too_many = self._displaced >= self._options.max_executables
        return too_many and not is_padded and self._options.fallback == "eager"

    def _note_churning(self) -> None:
        most = self._options.max_executables
        if self._displaced == most and self._is_churning:
            self.report.note_failure(
                f"each set of sizes is compiled for itself, and there are more than twice the "
                f"{most} that are kept (max_executables): others run in eager from now on"
            )

    def _for_sizes(self, key: tuple[Any, ...], values: Sequence[Any]) -> Compiled:
        """Returns a program for new sizes: a padded one, unless these sizes were seen often."""
        with stages.clocked(stages.StageClock(self.report.stage_seconds)):
            if key not in self._counted:
                known = self._of_first_sizes(values)
                if known is None and self._padded is not None:
                    known = self._find_padded(self._padded, key, values)
                if known is not None:
                    return known
            return self._compile(lambda: specialize(self._graph, values, self._is_ranged))

    def _of_first_sizes(self, values: Sequence[Any]) -> Compiled | None:
        """The program of the graph that Dynamo captured for these sizes alone; None: there is none.

        Where programs serve ranges, it is replaced instead (see `succession.after_compiling`).
        """
        if self._is_static or self._is_ranged:
            return None

        def specialized() -> Graph:
            graph = specialize(self._graph, values)
            PASSES(graph)
            return graph

        start = time.perf_counter()
        with done_without(self.report, "looking for the program of the first sizes"):
            found = succession.of_first_sizes(self._capture, values, specialized)
            if found is None:
                return None
            program, report = found
            if not self._served:
                self.report.describe_as(report)
            shapes = describe_shapes(specialize(self._graph, values), self.report.inputs)
            program.also_reports_to(self.report)
            served = self._note_shared("exact", shapes, start)
            given = enumerate(self._graph.placeholders[: len(values) - len(self._constants)])
            tensors = [i for i, place in given if isinstance(place.meta["val"], Tensor)]
            return OfFirstSizes(program, served, tensors)
        return None

    def _frequent_sizes(self) -> FrequentSizes | None:
        """Sizes that get executables of their own though one serves all; None: none do."""
        options, graph = self._options, self._graph
        is_wanted = options.specialize and options.ranges and self._backend.serves_ranges
        values = (place.meta.get("val") for place in graph.placeholders)
        is_on_cpu = all(v.device.type == "cpu" for v in values if isinstance(v, Tensor))
        if not (is_wanted and is_on_cpu and computes_with_sizes(graph)):
            return None
        sizes = FrequentSizes(graph, options.max_executables, self._submit_exact)
        return None if sizes.is_over else sizes

    def _submit_exact(self, key: Hashable, args: Sequence[Any]) -> bool:
        values = stand_ins(self._graph, [*args, *self._constants])
        job = lambda graph: graph._compile_exact(key, values)  # noqa: E731
        return background.submit((key, "exact"), job, owner=self)

    def _compile_exact(self, key: Hashable, values: Sequence[Any]) -> None:
        """Compiles for sizes that a program for all serves so far, beside the calls."""
        frequent, program = self._frequent, self.ranged.proven
        assert frequent is not None and program is not None, "who asked"
        start = time.thread_time()  # while calls run it waits
        try:
            with disable_current_modes():
                graph = specialize(self._graph, values)
                PASSES(graph)
                exact, _ = self._build(graph)
                exact.prepare(values)
        except Exception:  # the program for all goes on
            log.debug("no executable for sizes that come often", exc_info=True)
            frequent.failed(key)
        else:
            frequent.add(key, exact, program, time.thread_time() - start)

    def _padded_programs(self, symbols: Mapping[str, Sequence[str]]) -> PaddedPrograms | None:
        options = self._options
        rule = protocols.buckets(self._backend, options) if options.ranges else None
        if rule is None or not computes_with_sizes(self._graph):
            return None
        named = named_bounds(rule.named, symbols)
        most, build = options.max_executables, self._build_padded
        return PaddedPrograms(self._graph, rule, named, most, build)

    def _find_padded(
        self, programs: PaddedPrograms, key: tuple[Any, ...], values: Sequence[Any]
    ) -> Compiled | None:
        try:
            found = programs.find(key, values)
        except Exception as error:  # these sizes are compiled exactly, and what fails there counts
            log.debug("no program could be padded", exc_info=True)
            programs.reason = brief_error(error)
            found = None
        if programs.reason and not self.report.exact:
            self.report.exact = programs.reason
            log.info("%s: sizes are not padded: %s", self._backend.name, programs.reason)
        return found

    def _build_padded(self, graph: Graph) -> Program | None:
        program, serves_range = self._build(graph, padded=True)
        return program if serves_range else None

    def _compile(self, make: Callable[[], Graph]) -> Compiled:
        """What runs a copy of the graph, for concrete sizes; what fails is left to eager."""
        try:
            with stages.stage(stages.PASSES):
                graph = make()
                PASSES(graph)
            return self.ranged.find(graph) or self._shared(graph) or self._built(graph)
        except Exception as error:
            module, what = self._graph.module, "compiling the graph"
            in_eager(self._eager, module, self.report, self._options, error, what)
            return self._eager

    def _with_distinct_sizes(self, graph: Graph, still: Collection[Any]) -> Graph | None:
        return with_distinct_sizes(Symbols(self._graph), graph, still)

    def _shared(self, graph: Graph) -> Compiled | None:
        """The program of another captured graph of the same function; None: none is right for it.

        Args:
            graph: After all passes.
        """
        if self._is_static or not self._is_ranged or self._backend.depends_on_ranges:
            return None
        start = time.perf_counter()
        found = succession.of_another_range(self, self._capture, graph)
        if found is None:
            return None
        program, report = found
        self.report.describe_as(report)
        shapes = describe_shapes(graph, self.report.inputs, ranged=True)
        shared = Shared(program, self._note_shared("ranged", shapes, start))
        program.also_reports_to(self.report)
        program.verify_again()
        self.ranged.add(shared, graph)
        return shared

    def _note_shared(self, by: ServedBy, shapes: tuple[str, ...], start: float) -> Served:
        """Notes that a program of another graph serves this one from now on."""
        made = self._record(shapes, (self.report.executables, self.report.cache_hits), start)
        served = Served(by, shapes, 0, 0, made.seconds)
        self._served.append(served)
        return served

    def _built(self, graph: Graph) -> Program:
        program, serves_range = self._build(graph)
        if serves_range:
            self.ranged.add(program, graph)
        if self._is_ranged or self._is_static:
            with done_without(self.report, "replacing the program of the first sizes"):
                succession.after_compiling(self, self._capture, graph, serves_range)
        return program

    def _build(self, graph: Graph, padded: bool = False) -> tuple[Program, bool]:
        """Returns a program, and whether it serves a range of sizes."""
        start = time.perf_counter()
        before = self.report.executables, self.report.cache_hits
        arena.rest()
        if (
            protocols.resident_device(self._backend, self._options) is not None
        ):  # masks would have to go there
            graph = graph.copy()
            seed_draws(graph)
        builder = ProgramBuilder(self._backend, graph, self._constants, self._options, self.report)
        program = builder.build()
        shapes: tuple[str, ...] = ()
        with done_without(self.report, "describing the inputs"):
            shapes = describe_shapes(graph, self.report.inputs, builder.serves_range, padded)
        with done_without(self.report, "describing a compilation"):
            made = self._record(shapes, before, start)
            program.served = Served(
                _served_by(builder.serves_range, padded), shapes, 0, made.executables, made.seconds
            )
            self._served.append(program.served)
        if self._is_published:
            trace(self.report, "graph" if self._is_static else "sizes")
        return program, builder.serves_range

    def _record(
        self, shapes: tuple[str, ...], before: tuple[int, int], start: float
    ) -> Compilation:
        report, seconds = self.report, time.perf_counter() - start
        executables, hits = report.executables - before[0], report.cache_hits - before[1]
        made = Compilation(shapes, executables, hits, seconds)
        report.note_compilation(made)
        return made
