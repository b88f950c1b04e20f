"""Runs a call in a program compiled for larger sizes, with padded inputs.

A backend that compiles static shapes only may pad inputs (`PadsShapes.buckets`). Then a program is
compiled for bounds. It is right for smaller sizes if the passes make the same graph for them,
expression by expression (see `ranged`): nothing was decided because of the bounds.

A call waits for a compilation only if no program serves it. That program is a wide one; narrower
ones for the sizes that calls have are compiled beside them, and then take over.
"""

import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.passes import PASSES
from dynamo_backends.graph.specialize import GraphSymbols
from dynamo_backends.graph.symbolic_scalars import has_hardcoded_sizes
from dynamo_backends.graph.symbolic_sizes import cap_sizes_at_current
from dynamo_backends.interface.errors import NotPaddedError, brief_error
from dynamo_backends.interface.protocols import BucketRule
from dynamo_backends.interface.report import GraphReport, ServedCalls
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.shapes.buckets import (
    BucketRounding,
    PaddingDemand,
    Sizes,
    count_positions,
    padding_ratio,
)
from dynamo_backends.pipeline.shapes.ranged_programs import RangeProof
from dynamo_backends.pipeline.shapes.strategy import ProgramRequest
from dynamo_backends.runtime.cache import LRU
from dynamo_backends.runtime.program import Program

log = logging.getLogger("dynamo_backends")

FORGOTTEN = "a symbolic size is used as a number"
IN_PARTS = "its executable does not support smaller sizes"

WASTE = 4
"""Largest ratio of computed to real positions with which a program serves sizes at once."""

SPARE = 1.25
"""Ratio of computed to real positions at which a program is about as fast as eager."""

COMPILATION_S = 1.0
"""Least seconds that a compilation is assumed to take; programs may have come from disk."""

KNOWN = 1024
"""Number of sets of sizes whose times are remembered."""


class PaddedProgram:
    """A program with the sizes that it is padded to.

    Attributes:
        seconds: Seconds of its shortest call.
        used: When it was last found, in calls of `find`.
    """

    def __init__(self, program: Program, bounds: Sizes, mark: str):
        self.program = program
        self.bounds = bounds
        self.mark = mark
        self.seconds = math.inf
        self.used = 0

    def serves_at_once(self, sizes: Sizes) -> bool:
        """Returns whether padding these sizes is cheaper than compiling for them."""
        factor = padding_ratio(self.bounds, sizes)
        return factor <= WASTE or (factor < math.inf and self.seconds < self.program.served.seconds)


class PaddedDispatch:
    """Runs one set of sizes in the narrowest program, and counts padding's cost.

    Args:
        programs: The programs.
        found: The one that serves them now.
        sizes: The sizes.
        calls: Number after which they get their own program; None: when padding has taken as long
            as compiling one does.
    """

    def __init__(
        self, programs: "PaddedPrograms", found: PaddedProgram, sizes: Sizes, calls: int | None
    ):
        self._programs = programs
        self._found = found
        self._sizes = sizes
        self._calls = calls
        self._seen = 0
        self._lost = 0.0  # seconds
        self._share = self._padding()
        self._version = programs.version

    @property
    def served(self) -> ServedCalls:
        """The calls that its current program served, of all sizes."""
        return self._narrowest().program.served

    @property
    def program(self) -> Program:
        """The program that runs the next call."""
        return self._narrowest().program

    @property
    def exceeds_padding_budget(self) -> bool:
        """Whether padding cost so much that these sizes get an exact program."""
        if self._calls is not None:
            is_enough = self._seen >= self._programs.eviction_backoff * self._calls
        elif self._lost < COMPILATION_S:
            return False
        else:
            is_enough = (
                self._lost >= self._programs.eviction_backoff * self._programs.compile_seconds
            )
        return is_enough and self._narrowest().bounds != self._sizes

    @property
    def awaits_narrower_program(self) -> bool:
        """Whether a narrower program is being compiled and eager may be faster."""
        bounds = self._narrowest().bounds
        return self._programs.is_narrowing and padding_ratio(bounds, self._sizes) > SPARE

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        self._seen += 1
        padded = self._narrowest()
        start = time.perf_counter()
        results = padded.program(args)
        padded.seconds = min(padded.seconds, time.perf_counter() - start)
        self._lost += self._share * padded.seconds
        return results

    def _padding(self) -> float:
        """Returns the part of a call that is spent on padding, as far as sizes tell."""
        return 1 - 1 / padding_ratio(self._found.bounds, self._sizes)

    def _narrowest(self) -> PaddedProgram:
        if self._version != self._programs.version:
            self._version = self._programs.version
            found = self._programs.find_narrowest(self._found.mark, self._sizes)
            if found is not None and found is not self._found:
                self._found = found
                self._share = self._padding()
                self._programs.verify_unproven(found)
        return self._found


class PaddedPrograms:
    """Compiles and finds padded programs of one captured graph.

    Args:
        graph: With symbolic shapes.
        rule: How sizes are rounded up.
        named: Bounds that the user named, by symbol.
        most: Largest number of programs; beyond that only for sizes that none serves, and the one
            that was used least recently leaves.
        build: Makes a program of a graph that was specialised at bounds; None: its parts do not
            serve smaller sizes.
        report: Report of the graph; told why no program can be padded.

    Attributes:
        reason: Why no program of this graph can be padded; empty if one can, as far as is known.
        counted: What runs sizes that were seen, by the caller's keys.
        is_narrowing: Whether a narrower program is being made, or is to be.
        version: Changes with the programs that there are.
    """

    def __init__(
        self,
        graph: Graph,
        rule: BucketRule,
        named: Mapping[str, Sequence[int]],
        most: int,
        build: Callable[[Graph], Program | None],
        report: GraphReport,
    ):
        self.reason = ""
        self._report = report
        self.counted: LRU[Hashable, PaddedDispatch] = LRU(KNOWN)
        self.version = 0
        self.is_narrowing = False
        self._symbols = GraphSymbols(graph)
        self._rule = rule
        self._rounding = BucketRounding(rule, self._symbols.most, named)
        self._demand = PaddingDemand(self._rounding, rule.growth)
        self._most = most
        self._build = build
        self._lock = fork_safe_lock()
        self._programs: tuple[PaddedProgram, ...] = ()
        self._refused: set[tuple[int, ...]] = set()
        self._finds = self._replaced = 0
        self._proofs: dict[str, RangeProof] = {}
        self._proven = ""
        self._numbers: Sizes = {}

    def find_compiled(self, values: Sequence[Any]) -> Program | None:
        """Returns a compiled program that is valid for these sizes; None if none is."""
        sizes = self._sizes(values)
        found = self.find_narrowest(self._proven, sizes) if self._proven else None
        return None if found is None else found.program

    def find(self, request: ProgramRequest) -> PaddedDispatch | None:
        """Finds or compiles a padded program for a request; None to compile exactly.

        Compiles a wide program if there is none that serves them.
        """
        if request.key in self.counted:  # padded until that cost too much
            return None
        try:
            found = self._find(request)
        except Exception as error:  # these sizes are compiled exactly, and what fails there counts
            log.debug("a graph could not be compiled for padded inputs", exc_info=True)
            self.reason, found = brief_error(error), None
        if self.reason and not self._report.exact:
            self._report.exact = self.reason
            log.info("%s: sizes are not padded: %s", self._report.backend, self.reason)
        return found

    def _find(self, request: ProgramRequest) -> PaddedDispatch | None:
        if self.reason:
            return None
        sizes = self._sizes(request.values)
        mark = self._proven or self._proving(request.values)
        if self.reason:
            return None
        self._demand.note_sizes(sizes)
        found = self._serving(mark, sizes) or self._needed(mark, sizes)
        if found is None:
            return None
        if not self._demand.is_narrow_enough(found.bounds, sizes):
            self._ask_for_narrower(mark)
        counted = PaddedDispatch(self, found, sizes, self._rule.exact_after)
        self.counted.put(request.key, counted)
        return counted

    @property
    def eviction_backoff(self) -> int:
        """A factor that grows with evictions and delays exact compilations."""
        return 1 + self._replaced // self._most

    @property
    def compile_seconds(self) -> float:
        """The longest compile time of its programs in seconds, at least 1."""
        return max(COMPILATION_S, *(p.program.served.seconds for p in self._programs))

    def _sizes(self, values: Sequence[Any]) -> Sizes:
        """Returns what programs differ in; numbers are inputs of theirs like others."""
        read, numbers = self._symbols.bind_values(values), self._symbols.numbers
        self._numbers = {symbol: read[symbol] for symbol in numbers}
        return {symbol: size for symbol, size in read.items() if symbol not in numbers}

    def note_exact_program(self, key: Hashable) -> None:
        """Records that sizes got an exact program and are no longer padded."""
        self._replaced += self.counted.drop(key)

    def find_narrowest(self, mark: str, sizes: Sizes) -> PaddedProgram | None:
        """Returns the program with the least padding for these sizes; None if none fits."""
        return min(
            self._fitting(mark, sizes), key=lambda p: count_positions(p.bounds), default=None
        )

    def _fitting(self, mark: str, sizes: Sizes) -> list[PaddedProgram]:
        serves = (p for p in self._programs if p.mark == mark)
        return [p for p in serves if padding_ratio(p.bounds, sizes) < math.inf]

    def verify_unproven(self, padded: PaddedProgram) -> None:
        """Verifies the program's next call unless it is proven for all sizes."""
        if not self._proven:
            padded.program.verify_next_call()

    def _proving(self, values: Sequence[Any]) -> str:
        """Returns the fingerprint of the graph for these sizes."""
        graph = self._symbols.specialize(values)
        PASSES(graph)
        if has_hardcoded_sizes(graph.module.graph):
            self.reason = FORGOTTEN
        mark = fingerprint(graph, ranged=True)
        self._note(mark, graph)
        return mark

    def _note(self, mark: str, graph: Graph) -> None:
        """Notes sizes for which the passes make a graph of that fingerprint."""
        made = RangeProof(self._symbols, graph)
        proof = self._proofs.setdefault(mark, made)  # programs are made beside the calls
        if proof is not made:
            proof.add_graph(graph)
        proof.try_distinct_sizes(mark, graph)
        if proof.is_proven:
            self._proven = mark

    def _serving(self, mark: str, sizes: Sizes) -> PaddedProgram | None:
        """The narrowest program that there is, unless a narrower one is worth waiting for."""
        found = self.find_narrowest(mark, sizes)
        # One that was not called yet takes no longer than a wider one.
        if found is None or not any(p.serves_at_once(sizes) for p in self._fitting(mark, sizes)):
            return None
        self._finds += 1
        found.used = self._finds
        self.verify_unproven(found)
        return found

    def _needed(self, mark: str, sizes: Sizes) -> PaddedProgram | None:
        """Returns a program for which a call waits: a wide one, if there can be such a one."""
        wide, narrow = self._rounding.wide_bounds(sizes), self._rounding.nearest_bounds(sizes)
        if wide is None or narrow is None:  # larger than the user's bounds
            return None
        found = self._made(mark, wide)
        if found is None and wide != narrow and not self.reason:
            found = self._made(mark, narrow)
        return found

    def _ask_for_narrower(self, mark: str) -> None:
        if len(self._programs) >= self._most:
            self.is_narrowing = False
            return
        # The number tells it apart from the job that asks for it when it ends.
        number = len(self._programs) + len(self._refused)
        job = lambda programs: programs._make_narrower(mark)  # noqa: E731
        self.is_narrowing = True  # the job may have ended when `submit_compilation` returns
        if not background.submit_compilation(number, job, owner=self):
            self.is_narrowing = False

    def _make_narrower(self, mark: str) -> None:
        """Makes the program that spares the calls so far the most, and asks for the next one."""
        there = [p.bounds for p in self._programs if p.mark == mark]
        bounds = self._demand.find_best_bounds(there, self._refused)
        if bounds is None or self.reason:
            self.is_narrowing = False
            return
        try:
            with disable_current_modes():
                made = self._made(mark, bounds)
        except Exception:  # the wider one goes on
            log.debug("no program with narrower bounds could be compiled", exc_info=True)
            made = None
        if made is None:
            self._refused.add(tuple(bounds.values()))
        self._ask_for_narrower(mark)

    def _made(self, mark: str, bounds: Sizes) -> PaddedProgram | None:
        """Returns a new program; None if the passes make another graph for its bounds."""
        graph = self._symbols.specialize(self._symbols.make_arguments({**self._numbers, **bounds}))
        PASSES(graph)
        if fingerprint(graph, ranged=True) != mark:
            log.info(
                "sizes are not padded to %s, because the passes return a different graph", bounds
            )
            return None
        self._note(mark, graph)
        cap_sizes_at_current(graph)
        try:
            program = self._build(graph)
        except NotPaddedError as error:
            self.reason = str(error)
            return None
        if program is None:
            self.reason = IN_PARTS
            return None
        return self._kept(PaddedProgram(program, bounds, mark))

    def _kept(self, made: PaddedProgram) -> PaddedProgram:
        with self._lock:
            programs = sorted(self._programs, key=lambda p: p.used)
            self._programs = (*programs[max(len(programs) - self._most + 1, 0) :], made)
            made.used = self._finds
            self.version += 1
        return made
