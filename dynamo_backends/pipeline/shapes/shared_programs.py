"""Shares programs between captures of the same function at different sizes.

Dynamo captures a function for the sizes of its first call, and with symbols when a size changes. It
keeps both and asks first for the one that was hit last, so the first one's weights and temporaries
would stay for nothing. Where a program of the second graph serves the first sizes, too, it is given
what calls of the first there still are, and the first program goes.

Where there is no such program, the first sizes are given to the second graph all the same: Dynamo
asks for it first. They keep the program that was made of them.

Dynamo captures it again with symbols for sizes that its guards tell apart: torch chooses another
convolution below a batch of 16. If the passes make the same graph of it, the program is the same.
"""

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.passes import PASSES
from dynamo_backends.graph.specialize import recover_symbol_inputs, specialize
from dynamo_backends.graph.symbolic_sizes import has_size_expressions, without_unused_numbers
from dynamo_backends.interface.errors import suppress_and_log
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.report import GraphReport, ServedCalls
from dynamo_backends.pipeline.reporting import describe_shapes
from dynamo_backends.pipeline.shapes.ranged_programs import RangedPrograms
from dynamo_backends.pipeline.shapes.strategy import (
    CompiledCallable,
    ProgramRequest,
    VerifiableCallable,
)
from dynamo_backends.runtime.program import Program
from dynamo_backends.runtime.weight_binding import value_bits

log = logging.getLogger("dynamo_backends")


@dataclass(frozen=True)
class FunctionCapture:
    """One capture of a function: its graph, backend, options and constants.

    Attributes:
        function: Dynamo's name of the function; None: Dynamo did not capture it.
        backend: Name of the backend.
        options: Options of the backend.
        graph: In normal form.
        constants: Values of its last placeholders.
        mark: Fingerprint of a graph for one set of sizes after all passes; empty: it has symbols.
    """

    function: str | None
    backend: str
    options: Options
    graph: Graph
    constants: Sequence[Tensor]
    mark: str = ""

    def is_of_same_function(self, other: "FunctionCapture") -> bool:
        """Returns whether another capture is of the same function and options."""
        mine, theirs = (
            (x.function, x.backend, x.options, x.graph.kind, len(x.constants))
            for x in (self, other)
        )
        known = self.function is not None and mine == theirs
        return known and all(map(_equal, self.constants, other.constants))


def _equal(a: Tensor, b: Tensor) -> bool:
    alike = a.dtype == b.dtype and a.device == b.device
    return alike and torch.equal(value_bits(a), value_bits(b))  # -0.0 is another constant than 0.0


class SuccessorProgram:
    """Runs a static graph's calls in a dynamic graph's program.

    Args:
        program: The program.
        numbers: One per input of it: None, or the value of a symbol, which the graph is not given.
    """

    def __init__(self, program: VerifiableCallable, numbers: Sequence[int | float | None]):
        self._program = program
        self._is_new = True
        self._inputs: list[Any] = list(numbers)
        self._tensors = [i for i, number in enumerate(numbers) if number is None]

    @property
    def served(self) -> ServedCalls:
        """The calls that the dynamic program served."""
        return self._program.served

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs it; clears the list of arguments."""
        if self._is_new:
            self._is_new = False
            self._program.verify_next_call()
        values = self._inputs.copy()
        for i, value in zip(self._tensors, args, strict=True):
            values[i] = value
        args.clear()
        return self._program(values)


class ProgramOwner(Protocol):
    """The interface of `CompiledGraph` that shared programs use.

    Attributes:
        report: Report of the graph.
        ranged: Those that serve ranges.
    """

    report: GraphReport
    ranged: RangedPrograms

    @property
    def static_program(self) -> Any:
        """The program of a static graph; None if replaced or not compiled yet."""

    def replace_static_program(self, successor: SuccessorProgram) -> None:
        """Replaces a static graph's program by a successor."""

    def adopt_program(
        self,
        program: Program,
        report: GraphReport,
        by: Literal["ranged", "exact"],
        shapes: tuple[str, ...],
        start: float,
    ) -> ServedCalls:
        """Records that another graph's program runs this graph; returns its counter.

        Args:
            program: The program.
            report: Report of the graph that it was compiled for.
            by: How it serves sizes.
            shapes: Of what it serves (see `describe_shapes`).
            start: When it was first looked for, by `time.perf_counter()`.
        """


class SharedProgram:
    """Runs a graph in the program of another capture of the same function.

    Args:
        program: The program.
        served: What it serves of this graph.
    """

    def __init__(self, program: Program, served: ServedCalls):
        self._program = program
        self.served = served

    def verify_next_call(self) -> None:
        """Verifies the next call against eager, as `Program.verify_next_call`."""
        self._program.verify_next_call()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs it; clears the list of arguments."""
        return self._program(args)


class ProgramOfFirstSizes:
    """Runs a dynamic graph at one set of sizes in a static graph's program.

    Args:
        program: The program.
        served: What it serves of the graph with symbols.
        tensors: Which inputs it is given; the others are numbers.
    """

    def __init__(self, program: Program, served: ServedCalls, tensors: Sequence[int]):
        self._program = program
        self._tensors = tensors
        self.served = served

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs it; clears the list of arguments."""
        values = [args[i] for i in self._tensors]
        args.clear()
        return self._program(values)


_static: weakref.WeakKeyDictionary[ProgramOwner, FunctionCapture] = weakref.WeakKeyDictionary()
_ranged: weakref.WeakKeyDictionary[ProgramOwner, FunctionCapture] = weakref.WeakKeyDictionary()
_lock = fork_safe_lock()


class SharedPrograms:
    """Finds programs of other captures of the same function.

    Args:
        owner: Owner of the programs of this graph; what is noted of it is forgotten with it.
        capture: This graph.
        is_ranged: Whether programs of it serve ranges.
        depends_on_ranges: See `Backend.depends_on_ranges`.
    """

    def __init__(
        self,
        owner: ProgramOwner,
        capture: FunctionCapture,
        is_ranged: bool,
        depends_on_ranges: bool,
    ):
        self._owner = owner
        self._capture = capture
        self._is_ranged = is_ranged
        self._depends_on_ranges = depends_on_ranges

    def find(self, request: ProgramRequest) -> CompiledCallable | None:
        """Returns a program of another capture that is valid for a request; None if none.

        Of a graph with symbols only.
        """
        start = time.perf_counter()
        if self._is_ranged:
            return None if self._depends_on_ranges else self._of_another_range(request.graph, start)
        with suppress_and_log(
            self._owner.report, "looking up a program that was compiled for the first sizes"
        ):
            return self._of_first_sizes(request, start)
        return None

    def _of_first_sizes(self, request: ProgramRequest, start: float) -> CompiledCallable | None:
        """Returns the program that the function was given when captured for these sizes alone.

        Where programs serve ranges, it is replaced instead (see `note_compiled`).
        """
        values = request.values
        shapes = [v.shape for v in values if isinstance(v, Tensor)]
        with _lock:
            earlier = [
                (owner.static_program, owner.report, static.mark)
                for owner, static in _static.items()
                if static.is_of_same_function(self._capture) and _shapes(static.graph) == shapes
            ]
        mark = fingerprint(without_unused_numbers(request.graph)) if earlier else ""
        for program, report, known in earlier:
            if known == mark and isinstance(program, Program) and not report.events:
                log.info(
                    "a repeated size reuses the program that was compiled for it before sizes "
                    "became dynamic"
                )
                text = describe_shapes(request.graph, self._owner.report.inputs)
                served = self._owner.adopt_program(program, report, "exact", text, start)
                given = values[: len(values) - len(self._capture.constants)]
                tensors = [i for i, value in enumerate(given) if isinstance(value, Tensor)]
                return ProgramOfFirstSizes(program, served, tensors)
        return None

    def _of_another_range(self, graph: Graph, start: float) -> CompiledCallable | None:
        """Returns a program for another range of sizes that is right for a graph, too.

        Args:
            graph: For the sizes of a call, after all passes.
            start: See `Owner.adopt_program`.
        """
        with _lock:
            others = [
                (other.report, other.ranged)
                for other, earlier in _ranged.items()
                if other is not self._owner and earlier.is_of_same_function(self._capture)
            ]
        mark = fingerprint(graph, ranged=True) if others else ""
        for report, programs in others:
            program = programs.find_by_fingerprint(mark)
            if isinstance(program, Program) and not report.events:
                log.info(
                    "a dynamic graph reuses the program that was compiled for another range of "
                    "sizes"
                )
                text = describe_shapes(graph, self._owner.report.inputs, ranged=True)
                served = self._owner.adopt_program(program, report, "ranged", text, start)
                shared = SharedProgram(program, served)
                shared.verify_next_call()
                self._owner.ranged.add(shared, graph)
                return shared
        return None

    def note_compiled(self, graph: Graph, serves_range: bool) -> None:
        """Registers a compiled graph for sharing, and replaces static programs by it.

        Args:
            graph: What was compiled, after all passes.
            serves_range: The program is one of those of the owner that serve ranges.
        """
        owner, capture = self._owner, self._capture
        if not serves_range:
            if not has_size_expressions(graph.module.graph):
                with _lock:
                    _static[owner] = replace(capture, mark=fingerprint(graph))
            return
        with _lock:
            _ranged[owner] = capture
            earlier = [pair for pair in _static.items() if pair[1].is_of_same_function(capture)]
        for before, static in earlier:
            successor = _successor(capture, static, owner.ranged)
            if successor is not None:
                log.info("a dynamic program replaces the program of the first sizes")
                before.replace_static_program(successor)
                with _lock:
                    _static.pop(before, None)


def _shapes(graph: Graph) -> list[torch.Size]:
    given = (place.meta["val"] for place in graph.placeholders)
    return [v.shape for v in given if isinstance(v, Tensor)]


def _successor(
    capture: FunctionCapture, static: FunctionCapture, programs: RangedPrograms
) -> SuccessorProgram | None:
    given = [place.meta["val"] for place in static.graph.placeholders]
    values = recover_symbol_inputs(capture.graph, given)
    if values is None:
        return None
    try:
        graph = specialize(capture.graph, values, remember=True)
        PASSES(graph)
    except Exception:  # its guards may not admit the first sizes
        log.debug("the program of the first sizes is kept", exc_info=True)
        return None
    if fingerprint(without_unused_numbers(graph)) != static.mark:
        return None
    program = programs.find_for_graph(graph)
    if program is None:
        return None
    count = len(values) - len(capture.constants)
    return SuccessorProgram(program, [None if isinstance(v, Tensor) else v for v in values[:count]])
