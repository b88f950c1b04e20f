"""Programs that serve a range of sizes, and what shows that they do.

A program is compiled for the sizes of one call, from a graph in which sizes know their expressions.
It serves others too if the same passes make the same graph for them, expression by expression:
nothing was decided, or computed beforehand, because of the sizes of that call. This is looked at
for each new set of sizes until those seen tell every two expressions of the graph apart; from then
on all sizes that Dynamo's guards allow are the program's.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.numbers import has_forgotten
from dynamo_backends.graph.sizes import inner_sizes
from dynamo_backends.interface.report import Served
from dynamo_backends.runtime.lru import LRU

STILL = 3
"""After so many different sets of sizes what was the same in all of them may be so for ever."""

Distinct = Callable[[Graph, Collection[Any]], Graph | None]
"""See `distinct.with_distinct_sizes`."""


class Compiled(Protocol):
    """Runs a graph."""

    @property
    def served(self) -> Served:
        """Counts its calls."""
        ...

    def __call__(self, args: list[Any], /) -> Sequence[Any]:
        """Runs it; clears the list of arguments."""
        ...


class Comparable(Compiled, Protocol):
    """What runs a graph, and is compared with eager."""

    def verify_again(self) -> None:
        """See `Program.verify_again`."""


class Proof:
    """Sizes for which the passes make the same graph.

    Args:
        graph: After all passes, for the first sizes.
    """

    def __init__(self, graph: Graph):
        self._examples: list[dict[Any, int]] = []
        self._has_forgotten = has_forgotten(graph.module.graph)
        self._tried: set[bool] = set()  # with sizes that were always the same, and without
        self.add(graph)

    def add(self, graph: Graph) -> None:
        """Notes further sizes for which the passes make the same graph."""
        # Whole: numbers of two threads that mix would tell expressions apart that never differed.
        self._examples.append({size.expression: int(size) for size in inner_sizes(graph)})

    @property
    def is_proven(self) -> bool:
        """Whether no two expressions, and no expression and a number, were always equal."""
        seen = self._seen()
        return not self._has_forgotten and _have_varied(seen) and len(set(seen)) == len(seen)

    def complete(self, mark: str, distinct: Callable[[Collection[Any]], Graph | None]) -> None:
        """Tells apart what calls do not; tried once for each of two reasons.

        Expressions vary, but always alike; or some are the same in all calls, such as the batch of
        a service whose lengths vary.

        Args:
            mark: Fingerprint of the graphs.
            distinct: Makes one for sizes that differ, and that are others than a call's where they
                have these symbols, after all passes; None: there is none.
        """
        values = self._values()
        still = {s for e, v in values.items() if len(set(v)) == 1 for s in e.free_symbols}
        seen = list(values.values())
        sets = set(zip(*seen, strict=True))
        needed = len(sets) >= STILL if still else len(set(seen)) < len(seen)
        if self._has_forgotten or bool(still) in self._tried or not needed:
            return
        self._tried.add(bool(still))
        graph = distinct(still)
        if graph is not None and fingerprint(graph, ranged=True) == mark:
            self.add(graph)

    def _seen(self) -> list[tuple[int, ...]]:
        return list(self._values().values())

    def _values(self) -> dict[Any, tuple[int, ...]]:
        """What each expression has been."""
        values: dict[Any, list[int]] = {}
        for expression, value in (pair for x in self._examples.copy() for pair in x.items()):
            values.setdefault(expression, []).append(value)
        return {e: tuple(v) for e, v in values.items() if e.free_symbols}


def _have_varied(seen: Sequence[tuple[int, ...]]) -> bool:
    return all(len(set(values)) > 1 for values in seen)


class Ranged(Proof):
    """A program, and the sizes for which it is known to be right.

    Args:
        program: All of whose executables serve a range.
        graph: After all passes, for the sizes that it was compiled for.
    """

    def __init__(self, program: Comparable, graph: Graph):
        super().__init__(graph)
        self.program = program
        self.mark = fingerprint(graph, ranged=True)


class RangedPrograms:
    """The programs of one captured graph that serve ranges.

    Args:
        most: So many are kept, those that were found or made last.
        distinct: See `distinct.with_distinct_sizes`.

    Attributes:
        proven: The program for all sizes, once there is one.
    """

    def __init__(self, most: int, distinct: Distinct) -> None:
        self.proven: Compiled | None = None
        self._distinct = distinct
        self._candidates: LRU[str, Ranged] = LRU(most)

    def add(self, program: Comparable, graph: Graph) -> None:
        """Notes a program that was compiled for the sizes of a graph."""
        made = Ranged(program, graph)
        self._candidates.put(made.mark, made)

    def existing(self, mark: str) -> Comparable | None:
        """Returns the program of a graph with this fingerprint; None: there is none."""
        found = self._candidates.get(mark)
        return found.program if found is not None else None

    def find(self, graph: Graph) -> Comparable | None:
        """Returns the program that is right for a graph of other sizes; None: there is none yet.

        Its next call is verified as its first one was.

        Args:
            graph: After all passes.
        """
        if not len(self._candidates):
            return None
        found = self._candidates.get(fingerprint(graph, ranged=True))
        if found is None:
            return None
        found.add(graph)
        found.complete(found.mark, lambda still: self._distinct(graph, still))
        found.program.verify_again()
        if found.is_proven:
            self.proven = found.program
        return found.program
