"""Runs a partitioned graph: compiled blocks and eager parts in order.

This is the hot path of every compiled call. A graph that a backend takes whole costs one list
look-up, the check of its frozen weights, and the backend's own call.
"""

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch.profiler import record_function

from dynamo_backends._torch_private import generated_forward, is_profiled
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.eager_calls import make_eager_module
from dynamo_backends.graph.graph import Graph, Role
from dynamo_backends.interface.counters import VENDOR, time_stage
from dynamo_backends.interface.errors import VerificationError, brief_error, suppress_and_log
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.report import GraphReport, ServedCalls, SpeedReport
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.runtime.index_checks import call_eager_marked
from dynamo_backends.runtime.speed_check import SpeedCheck, describe_operators
from dynamo_backends.runtime.speed_timing import TimedCalls, TimedRuns
from dynamo_backends.runtime.weight_binding import Policy, WeightBinding
from dynamo_backends.verify import bisection
from dynamo_backends.verify.first_call import Comparison, described_region

log = logging.getLogger("dynamo_backends")

Getter = Callable[[Sequence[Any]], Sequence[Any]]


def make_picker(positions: Sequence[int]) -> Getter:
    """Returns a fast function that selects the given positions of a sequence."""
    if not positions:
        return lambda _: ()
    first, count = positions[0], len(positions)
    if tuple(positions) == tuple(range(first, first + count)):
        return operator.itemgetter(slice(first, first + count))
    return operator.itemgetter(*positions)


class Block:
    """A compiled part of a graph with its weights and eager fallback.

    Args:
        graph: The block; its module is the eager original. Sizes among its inputs are for that.
        executable: The compiled block.
        policy: How frozen weights are watched.
        may_fall_back: Whether an error in compiled code is answered by running the original.
        report: Where re-bindings and fallbacks are counted.
        verify: Which calls are compared with eager: "first", "always" or "off".
        reduced: Whether the user admits bfloat16.
        compile_part: Compiles a part of the block, to find out what is wrong.
        pace: Finds out whether it is slower than eager; None: nobody does.

    Attributes:
        graph: The same.
        executable: The same.
    """

    def __init__(
        self,
        graph: Graph,
        executable: Executable,
        policy: Policy,
        may_fall_back: bool,
        report: GraphReport,
        verify: str = "off",
        reduced: bool = False,
        compile_part: Callable[[Graph], Executable] | None = None,
        pace: SpeedCheck | None = None,
    ):
        self.executable = executable
        eager = make_eager_module(graph.module)
        run = lambda values: generated_forward(eager)(*values)  # noqa: E731
        self._switch = EagerSwitch(run, [report], "block", may_fall_back)
        binding = WeightBinding(executable, policy, report)
        self._bind, self._prepare = binding.bind, binding.bind_ahead
        self._report = report
        self._pick_weights = make_picker(graph.weights)
        given = [i for i in graph.activations if graph.inputs[i].role is not Role.SYMBOL]
        self._pick_activations = make_picker(given)
        self._unbound: Bound | None = None
        self.graph = graph
        self._verify = verify
        self._reduced = reduced
        self._compile_part = compile_part
        self._verifying = fork_safe_lock()
        self._updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self._paced: TimedCalls | None = None
        if pace is not None:
            runs = TimedRuns(self._answer, self.run_eager, self._repeat, self._pick_activations)
            self._paced = pace.make_timed_calls([graph], runs, self._switch, self.end_timing)
        self._pace = pace
        # What takes calls in place of compiled code; after the first calls nothing, as a rule.
        self._instead: Callable[[Sequence[Any]], Sequence[Any]] | None = self._paced
        if verify != "off":
            self._instead = self._verified
        if not graph.weights:
            try:
                with time_stage(VENDOR):
                    self._unbound = executable.bind(())[0]
            except Exception as error:
                self._switch.switch_after_error(brief_error(error), error)
                self._instead = self._switch.eager

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """Runs the block on one value per graph input."""
        instead = self._instead
        if instead is not None:
            return instead(values)
        try:  # as in `compiled`, whose call would take time at every call of this one
            bound = self._unbound
            if bound is None:
                bound = self._bind(self._pick_weights(values))
            return bound(list(self._pick_activations(values)))
        except Exception as error:
            return self._after_failure(error, values)

    def _answer(self, values: Sequence[Any]) -> Sequence[Any]:
        """Runs compiled code on a call's values; eager where that fails."""
        try:
            return self._compiled(values)
        except Exception as error:
            return self._after_failure(error, values)

    def _repeat(self, values: Sequence[Any]) -> Sequence[Any]:
        """Runs compiled code once more; what it may write over stays as it is."""
        given = list(values)
        for i in self._updated:
            given[i] = given[i].clone()
        return self._compiled(given)

    def run_eager(self, values: Sequence[Any]) -> Sequence[Any]:
        """Runs the eager original, without switching to it."""
        results: Sequence[Any] = self._switch.eager(values)
        return results

    def end_timing(self, is_slower: bool) -> None:
        """Ends timing; compiled code, or eager if slower, runs all further calls.

        Args:
            is_slower: Eager takes them instead.
        """
        self._paced = None
        return_free_memory()  # eager's temporaries
        if is_slower:
            self._instead = self._switch.eager
        elif self._instead != self._verified and self._instead is not self._switch.eager:
            self._instead = None

    @property
    def is_timing_over(self) -> bool:
        """Whether neither timing nor verification is pending."""
        return self._instead is None or self._instead is self._switch.eager

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code, not eager, runs calls."""
        return self._instead is not self._switch.eager

    def _compiled(self, values: Sequence[Any]) -> Sequence[Any]:
        bound = self._unbound
        if bound is None:
            bound = self._bind(self._pick_weights(values))
        return bound(list(self._pick_activations(values)))

    def _verified(self, values: Sequence[Any]) -> Sequence[Any]:
        """Runs the block and compares it with eager.

        Raises:
            VerificationError: It is wrong, and must not fall back, or an input is lost.
            FallbackRefusedError: It failed, and must not fall back.
        """
        with self._verifying:
            if self._instead == self._verified:  # no other thread has done it meanwhile
                return self._compare(values)
        return self(values)

    def _compare(self, values: Sequence[Any]) -> Sequence[Any]:
        is_once = self._verify == "first"
        given = list(values)  # eager is to read what compiled code may write over

        def run() -> Sequence[Any]:
            if is_once:
                return_free_memory()  # eager's temporaries
            return self._compiled(given)

        try:
            if is_once:
                self.executable.release_memory()
            comparison = Comparison(self.graph, self._reduced)
            for i in self._updated:
                given[i] = given[i].clone()
            outcome = comparison(run, values)
        except Exception as error:
            return self._after_failure(error, values)
        self._report.note_comparison(outcome.seconds, outcome.unverified)
        if not outcome.wrong:
            if is_once:
                if self._paced is not None:
                    self._paced.eager_s = outcome.seconds
                self._instead = self._paced
                self._note_if_slow(values)
                return_free_memory()  # what the compiler left
            return outcome.results
        if outcome.is_lost:
            raise VerificationError(
                f"{self._report.backend}: {outcome.wrong}. The contents of this input are lost; "
                "load it again."
            )
        text = outcome.wrong + self._region(values)
        self._switch.switch_after_mismatch(f"{text} (a block of {described_region(self.graph)})")
        eager = self._gives_up()
        return eager(values) if outcome.expected is None else outcome.expected

    def _note_if_slow(self, values: Sequence[Any]) -> None:
        """Notes which operators are slow, if somebody asked."""
        if (
            self._compile_part is None
            or not bisection.is_bisection_requested("slow")
            or self._updated
        ):
            return
        with suppress_and_log(self._report, "looking for slow operators"):
            found = bisection.smallest_slow_region(self.graph, self._compile_part, values)
            if found is not None:
                own, eager, region = found
                why = "no part of it is slow when compiled separately"
                why = f"most of the time is spent in {region}" if region is not None else why
                part = describe_operators([self.graph])
                self._report.paces.append(SpeedReport("block", part, "slower", own, eager, why))

    def verify_next_call(self) -> None:
        """Verifies the next call against eager, as `Program.verify_next_call`."""
        if self._verify == "first" and self.is_compiled:
            self._instead = self._verified

    def add_report(self, report: GraphReport) -> None:
        """Adds a further report, as `Program.add_report`."""
        self._switch.add_report(report)
        if self._pace is not None:
            self._pace.reports.append(report)

    def bind_weights_ahead(self, values: Sequence[Any]) -> None:
        """Binds weights before the first call; errors are left to that call.

        Args:
            values: As for a call; only the weights are read.
        """
        weights = self._pick_weights(values)
        if self._unbound is not None or any(w is None for w in weights):
            return
        try:
            self._prepare(weights)
        except Exception:
            log.debug("binding weights ahead failed", exc_info=True)

    def _region(self, values: Sequence[Any]) -> str:
        """Returns which operators are wrong, in words; empty if nobody asked."""
        if self._compile_part is None or not bisection.is_bisection_requested():
            return ""
        try:
            region = bisection.smallest_wrong_region(
                self.graph, self._compile_part, values, self._reduced
            )
        except Exception as error:
            return f"; the wrong operators could not be found ({brief_error(error)})"
        if region is None:
            return "; no part of the block is wrong when compiled separately"
        return f"; the smallest wrong part: {region}"

    def split_inputs(self, values: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Splits a graph's input values into weights and activations."""
        return self._pick_weights(values), self._pick_activations(values)

    def _after_failure(self, error: Exception, values: Sequence[Any]) -> Sequence[Any]:
        """Eager's results in place of those of compiled code that raised."""
        results: Sequence[Any] = call_eager_marked(self._switch.run_eager_instead, error, values)
        self._gives_up()
        return results

    def _gives_up(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        eager: Callable[[Sequence[Any]], Sequence[Any]] = self._switch.eager
        self._instead, paced = eager, self._paced
        if paced is not None:
            paced.is_over = True
        return eager


@dataclass(frozen=True)
class EagerPart:
    """A part of a graph that runs in eager.

    Attributes:
        graph: The part.
    """

    graph: Graph

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """Runs it on one value per graph input."""
        results: Sequence[Any] = call_eager_marked(generated_forward(self._module), *values)
        return results

    @functools.cached_property
    def _module(self) -> fx.GraphModule:
        return make_eager_module(self.graph.module)


@dataclass(frozen=True)
class Instruction:
    """One part of a program with the registers it reads, writes and frees.

    Attributes:
        name: What profilers call it; empty: nothing.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    read: Getter
    writes: tuple[int, ...]
    dead: tuple[int, ...]
    name: str = ""


class Program:
    """Runs a whole captured graph, for one set of shapes or a range.

    Args:
        steps: In order.
        constants: Values of the registers after the graph's inputs.
        registers: How many registers there are.
        outputs: For each output a register, or a `LiteralOutput` for a value known at compile time.

    Attributes:
        steps: The same.
        constants: The same.
        registers: The same.
        outputs: The same.
        blocks: Those among the steps.
        served: How often it served a graph with symbols; its owner counts.
    """

    def __init__(
        self,
        steps: Sequence[Instruction],
        constants: Sequence[Tensor],
        registers: int,
        outputs: Sequence["int | LiteralOutput"],
    ):
        self.served = ServedCalls("exact", ())
        self.steps = tuple(steps)
        self._named = tuple(replace(s, run=wrap_in_record_function(s.name, s.run)) for s in steps)
        self.constants = list(constants)
        self.registers = registers
        self.outputs = tuple(outputs)
        self.blocks = [step.run for step in self.steps if isinstance(step.run, Block)]
        self._is_single = [step.writes for step in self.steps] == [self.outputs]
        self._paced: Callable[[list[Any]], Sequence[Any]] | None = None

    def bind_weights_ahead(self, values: Sequence[Any]) -> None:
        """Binds the weights of all blocks before the first call.

        Args:
            values: One per placeholder of the graph; only weights are read.
        """
        registers = [*values, *[None] * (self.registers - len(values))]
        for step in self.steps:
            if isinstance(step.run, Block):
                step.run.bind_weights_ahead(step.read(registers))

    def verify_next_call(self) -> None:
        """Verifies the next call against eager, because its sizes are new."""
        for block in self.blocks:
            block.verify_next_call()

    def add_report(self, report: GraphReport) -> None:
        """Adds the report of another graph that runs this program."""
        for block in self.blocks:
            block.add_report(report)

    def time_whole_program(self, pace: SpeedCheck, may_fall_back: bool, sized: Getter) -> None:
        """Times all blocks together against eager.

        Args:
            pace: Finds out whether they are slower.
            may_fall_back: Whether eager may take over.
            sized: Picks the arguments whose sizes may differ from call to call.
        """
        parts = [s.run.graph for s in self.steps if isinstance(s.run, Block | EagerPart)]
        compiled = Program(self.steps, self.constants, self.registers, self.outputs)
        steps = [
            replace(s, run=s.run.run_eager) if isinstance(s.run, Block) else s for s in self.steps
        ]
        eager = Program(steps, self.constants, self.registers, self.outputs)
        runs = TimedRuns(
            lambda args: compiled(list(args)), lambda args: eager(list(args)), None, sized
        )

        def settle(is_slower: bool) -> None:
            self._paced = None
            for block in self.blocks if is_slower else ():
                block.end_timing(is_slower)

        switch = EagerSwitch(eager, pace.reports, "graph", may_fall_back)
        paced = pace.make_timed_calls(parts, runs, switch, settle)
        if paced is None:
            return

        def call(args: list[Any]) -> Sequence[Any]:
            if not all(block.is_timing_over for block in self.blocks):
                return compiled(args)
            if not any(block.is_compiled for block in self.blocks):
                self._paced = None
                return compiled(args)
            given = list(args)
            args.clear()
            return paced(given)

        self._paced = call

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        paced = self._paced
        if paced is not None:
            return paced(args)
        values = args + self.constants
        args.clear()
        steps = self._named if is_profiled() else self.steps
        if self._is_single:
            step = steps[0]
            return step.run(step.read(values))
        values.extend([None] * (self.registers - len(values)))
        for step in steps:
            results = step.run(step.read(values))
            for register, result in zip(step.writes, results, strict=True):
                values[register] = result
            for register in step.dead:
                values[register] = None
        return [x.value if isinstance(x, LiteralOutput) else values[x] for x in self.outputs]


@dataclass(frozen=True)
class LiteralOutput:
    """An output that is a constant: None or a number."""

    value: Any


_UNSEEN = contextlib.nullcontext()


def graph_name(report: GraphReport, backend: str = "") -> str:
    """Returns a graph's name for profilers: backend, kind and number.

    Args:
        report: Report of the graph.
        backend: Who runs it, if that is another one than the report says.
    """
    name = f"{backend or report.backend} {report.kind} graph"
    return f"{name} {report.capture}" if report.capture else name


def part_names(graph: str, on_backend: Sequence[bool]) -> list[str]:
    """Returns profiler names of a graph's parts, such as "... block 1".

    Args:
        graph: Its name.
        on_backend: For each part, whether a backend runs it.
    """
    return [f"{graph} {'block' if x else 'eager'} {i}" for i, x in enumerate(on_backend, 1)]


def record_if_profiled(name: str) -> contextlib.AbstractContextManager[Any]:
    """Names the block in profiler traces, if one records (context manager)."""
    return record_function(name) if is_profiled() else _UNSEEN


def wrap_in_record_function(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in `record_function`; returns it unchanged for an empty name.

    Args:
        name: Empty: none.
        run: The function.
    """
    if not name:
        return run

    def call(*args: Any) -> Any:
        with record_function(name):
            return run(*args)

    return call
