"""Defines strategies that choose the program for a set of sizes.

`CompiledGraph` asks one strategy after the other. Where none has a program for the sizes, one is
compiled for them, which then serves these sizes or, where the vendor can, a range.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.passes import PASSES
from dynamo_backends.interface.counters import PASSES as PASSES_STAGE
from dynamo_backends.interface.counters import time_stage
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.report import GraphReport, ServedCalls
from dynamo_backends.runtime.cache import LRU


class CompiledCallable(Protocol):
    """The interface of a boxed function that runs a graph."""

    @property
    def served(self) -> ServedCalls:
        """The calls that it served."""
        ...

    def __call__(self, args: list[Any], /) -> Sequence[Any]:
        """Runs it; clears the list of arguments."""
        ...


class VerifiableCallable(CompiledCallable, Protocol):
    """A `CompiledCallable` whose next call can be verified against eager."""

    def verify_next_call(self) -> None:
        """Verifies the next call against eager, as `Program.verify_next_call`."""


class ProgramRequest:
    """A call's sizes for which a program is needed, and the graph for them.

    Args:
        key: Tells it apart from other sets (see `graph.specialize.shape_key`).
        values: One per placeholder of the captured graph.
        make: Makes a copy of the graph for these sizes.
    """

    def __init__(self, key: Hashable, values: Sequence[Any], make: Callable[[], Graph]):
        self.key = key
        self.values = values
        self._make = make

    @functools.cached_property
    def graph(self) -> Graph:
        """The graph for these sizes, after all passes."""
        with time_stage(PASSES_STAGE):
            graph = self._make()
            PASSES(graph)
        return graph


class ShapeStrategy(Protocol):
    """A way to run sizes in a program that was compiled for other sizes."""

    def find(self, request: ProgramRequest) -> CompiledCallable | None:
        """Returns a program for the requested sizes; None to try the next strategy."""
        ...


class ExactPrograms:
    """A least-recently-used cache of programs by their exact sizes.

    Args:
        options: Options of the backend; `max_executables` of the sets are kept.
        report: Report of the graph; told when further sets run in eager.
    """

    def __init__(self, options: Options, report: GraphReport):
        self._options = options
        self._report = report
        self._programs: LRU[Hashable, CompiledCallable] = LRU(options.max_executables)
        self._displaced = 0  # programs of one set of sizes that made room for others

    def get(self, key: Hashable) -> CompiledCallable | None:
        """Returns the program of these sizes; None if there is none."""
        return self._programs.get(key)

    def put(self, key: Hashable, program: CompiledCallable) -> None:
        """Stores the program of these sizes, evicting the least recently used."""
        most = self._options.max_executables
        if len(self._programs) >= most and program.served.by == "exact":
            self._displaced += 1
            if self._displaced == most and self.is_churning:
                self._report.note_failure(
                    "each set of sizes is compiled separately, and more than twice as many sets "
                    f"occur as the {most} executables that are kept; other sizes run in eager from "
                    "now on. Raise options={'max_executables': ...}"
                )
        self._programs.put(key, program)

    def clear(self) -> None:
        """Removes all programs."""
        self._programs.clear()

    @property
    def is_churning(self) -> bool:
        """Whether evictions exceed `max_executables`, so new sizes run in eager."""
        too_many = self._displaced >= self._options.max_executables
        return too_many and self._options.fallback == "eager"
