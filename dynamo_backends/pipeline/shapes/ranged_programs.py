"""Runs calls of all sizes in one program, once passes prove it independent of them.

A program is compiled for the sizes of one call, from a graph in which sizes know their expressions.
It serves others too if the same passes make the same graph for them, expression by expression:
nothing was decided, or computed beforehand, because of the sizes of that call. This is looked at
for each new set of sizes until those seen tell every two expressions of the graph apart; from then
on all sizes that Dynamo's guards allow are the program's.
"""

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy

from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.passes import PASSES
from dynamo_backends.graph.specialize import GraphSymbols
from dynamo_backends.graph.symbolic_scalars import has_hardcoded_sizes
from dynamo_backends.graph.symbolic_sizes import inner_varying_sizes
from dynamo_backends.graph.symbols import solve_symbol_values, symbol_ranges
from dynamo_backends.pipeline.shapes.strategy import (
    CompiledCallable,
    ProgramRequest,
    VerifiableCallable,
)
from dynamo_backends.runtime.cache import LRU

log = logging.getLogger("dynamo_backends")

STILL = 3
"""Number of different sets of sizes after which equal values may be equal for all sizes."""


class RangeProof:
    """Collects sizes for which passes yield one graph, until that holds for all.

    Args:
        symbols: Symbols of the captured graph.
        graph: After all passes, for the first sizes.
    """

    def __init__(self, symbols: GraphSymbols, graph: Graph):
        self._symbols = symbols
        self._examples: list[dict[Any, int]] = []
        self._has_forgotten = has_hardcoded_sizes(graph.module.graph)
        self._tried: set[bool] = set()  # with sizes that were always the same, and without
        self.add_graph(graph)

    def add_graph(self, graph: Graph) -> None:
        """Adds the sizes of a further graph that passes made identical."""
        # Whole: numbers of two threads that mix would tell expressions apart that never differed.
        self._examples.append({size.expression: int(size) for size in inner_varying_sizes(graph)})

    @property
    def is_proven(self) -> bool:
        """Whether observed sizes distinguish all size expressions of the graph."""
        seen = self._seen()
        return not self._has_forgotten and _have_varied(seen) and len(set(seen)) == len(seen)

    def try_distinct_sizes(self, mark: str, graph: Graph) -> None:
        """Tries invented sizes to distinguish expressions that were equal in all calls.

        Expressions vary, but always alike; or some are the same in all calls, such as the batch of
        a service whose lengths vary.

        Args:
            mark: Fingerprint of the graphs.
            graph: For the sizes of a call, after all passes.
        """
        values = self._values()
        still = {s for e, v in values.items() if len(set(v)) == 1 for s in e.free_symbols}
        seen = list(values.values())
        sets = set(zip(*seen, strict=True))
        needed = len(sets) >= STILL if still else len(set(seen)) < len(seen)
        if self._has_forgotten or bool(still) in self._tried or not needed:
            return
        self._tried.add(bool(still))
        other = specialize_distinct_sizes(self._symbols, graph, still)
        if other is not None and fingerprint(other, ranged=True) == mark:
            self.add_graph(other)

    def _seen(self) -> list[tuple[int, ...]]:
        return list(self._values().values())

    def _values(self) -> dict[Any, tuple[int, ...]]:
        """Returns what each expression has been."""
        values: dict[Any, list[int]] = {}
        for expression, value in (pair for x in self._examples.copy() for pair in x.items()):
            values.setdefault(expression, []).append(value)
        return {e: tuple(v) for e, v in values.items() if e.free_symbols}


def _have_varied(seen: Sequence[tuple[int, ...]]) -> bool:
    return all(len(set(values)) > 1 for values in seen)


class RangedProgram:
    """A program with the proof of the sizes that it is valid for.

    Args:
        program: All of whose executables serve a range.
        proof: Has the sizes that it was compiled for.
    """

    def __init__(self, program: VerifiableCallable, proof: RangeProof):
        self.program = program
        self.proof = proof


class RangedPrograms:
    """Finds programs of one captured graph that are valid for a range of sizes.

    Args:
        graph: The captured graph, with symbolic shapes.
        most: Number to keep, of those that were used last.

    Attributes:
        proven: The program for all sizes, once there is one.
    """

    def __init__(self, graph: Graph, most: int) -> None:
        self.proven: CompiledCallable | None = None
        self._graph = graph
        self._programs: LRU[str, RangedProgram] = LRU(most)

    @functools.cached_property
    def _symbols(self) -> GraphSymbols:
        return GraphSymbols(self._graph)

    def add(self, program: VerifiableCallable, graph: Graph) -> None:
        """Adds a program that was compiled for this graph's sizes."""
        made = RangedProgram(program, RangeProof(self._symbols, graph))
        self._programs.put(fingerprint(graph, ranged=True), made)

    def find_by_fingerprint(self, mark: str) -> VerifiableCallable | None:
        """Returns the program of a graph fingerprint; None if there is none."""
        found = self._programs.get(mark)
        return found.program if found is not None else None

    def find(self, request: ProgramRequest) -> VerifiableCallable | None:
        """Returns the program that is valid for a request's sizes; None if none is."""
        return self.find_for_graph(request.graph) if len(self._programs) else None

    def find_for_graph(self, graph: Graph) -> VerifiableCallable | None:
        """Returns the program valid for a graph and verifies its next call; else None.

        Its next call is verified as its first one was.

        Args:
            graph: After all passes.
        """
        mark = fingerprint(graph, ranged=True)
        found = self._programs.get(mark)
        if found is None:
            return None
        found.proof.add_graph(graph)
        found.proof.try_distinct_sizes(mark, graph)
        found.program.verify_next_call()
        if found.proof.is_proven:
            self.proven = found.program
        return found.program


def specialize_distinct_sizes(
    symbols: GraphSymbols, graph: Graph, still: Collection[Any] = ()
) -> Graph | None:
    """Specializes the captured graph at sizes that differ for each symbol.

    The caches of two layers are as long as each other in every call, and yet two sizes.

    Args:
        symbols: Symbols of the captured graph.
        graph: Specialised from it, for sizes of a call.
        still: Symbols that have other values than in the call.

    Returns:
        None: there are no such sizes within the guards, or the passes take none.
    """
    ranges = symbol_ranges(graph.placeholders)
    sizes = distinct_symbol_values(solve_symbol_values(graph.placeholders), ranges, still)
    if sizes is None:
        return None
    try:
        other = symbols.specialize(symbols.make_arguments(sizes))
        PASSES(other)
    except Exception:
        log.debug("equal sizes could not be replaced by distinct ones", exc_info=True)
        return None
    return other


def distinct_symbol_values(
    sizes: Mapping[sympy.Expr, int],
    ranges: Mapping[sympy.Expr, tuple[int, int | None]],
    still: Collection[Any] = (),
) -> dict[sympy.Symbol, int] | None:
    """Returns a different value for each symbol, near given sizes; None if impossible.

    Args:
        sizes: The values of a call.
        ranges: The least and the largest value of some of them; None: there is no largest.
        still: Symbols that get other values than these.

    Returns:
        None: there are none, or the symbols' values do not follow from the sizes.
    """
    found: dict[sympy.Symbol, int] = {}
    for symbol, size in sizes.items():
        lower, upper = ranges.get(symbol, (size, size))
        above = range(size, size + len(sizes) + 1)
        below = range(size - 1, max(lower, size - len(sizes) - 1) - 1, -1)
        allowed = [n for n in (*above, *below) if lower <= n and (upper is None or n <= upper)]
        taken = {*found.values(), *([size] if symbol in still else [])}
        free = [n for n in allowed if n not in taken]
        if not symbol.is_Symbol or not free:
            return None
        found[symbol] = free[0]
    return found
