"""Programs that serve all sizes up to those that they were compiled for.

A backend that compiles static shapes only may pad inputs (`Backend.buckets`). Then the sizes of a
call are rounded up, and a program is compiled for these bounds. It is right for smaller sizes if
the passes make the same graph for them, expression by expression (see `ranges`): nothing was
decided because of the bounds.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.numbers import has_forgotten
from dynamo_backends.graph.sequence import PASSES
from dynamo_backends.graph.sizes import cap
from dynamo_backends.graph.specialize import Symbols
from dynamo_backends.interface.backend import Buckets
from dynamo_backends.interface.errors import NotPaddedError
from dynamo_backends.interface.report import Served
from dynamo_backends.pipeline.ranges import Proof
from dynamo_backends.runtime.lru import LRU
from dynamo_backends.runtime.program import Program

log = logging.getLogger("dynamo_backends")

STEP = 4
"""Bounds are multiples of this, as far as guards allow."""

FORGOTTEN = "a size is used as a number"
IN_PARTS = "what it is compiled to does not serve smaller sizes"

Sizes = Mapping[sympy.Symbol, int]


def round_up(value: int, growth: float, most: int | None = None) -> int:
    """The bound for a size.

    Args:
        value: The size.
        growth: Each bound is about so many times the one before it.
        most: The largest value that guards allow; None: there is none.
    """
    bound = STEP
    while bound < value:
        bound = max(bound + STEP, math.ceil(bound * growth / STEP) * STEP)
    return bound if most is None else max(min(bound, most), value)


class Counted:
    """A padded program for one set of sizes, until these were seen often.

    Args:
        program: The program.
        calls: After so many, these sizes get a program of their own.
    """

    def __init__(self, program: Program, calls: float):
        self.program = program
        self.served: Served = program.served  # calls of whatever sizes
        self._left = calls

    @property
    def is_spent(self) -> bool:
        """Whether these sizes were seen so often."""
        return self._left <= 0

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        self._left -= 1
        return self.program(args)


@dataclass(frozen=True)
class _Padded:
    """A program, and up to which sizes it serves graphs of one fingerprint."""

    program: Program
    bounds: Sizes
    mark: str

    def waste(self, sizes: Sizes) -> float:
        """How many times the positions are computed that there are; infinite: it does not serve."""
        if any(n > self.bounds[s] for s, n in sizes.items()):
            return math.inf
        return _waste(self.bounds, sizes)


def _waste(bounds: Sizes, sizes: Sizes) -> float:
    return math.prod(bounds[s] / max(n, 1) for s, n in sizes.items())


class PaddedPrograms:
    """The padded programs of one captured graph.

    Args:
        graph: With symbolic shapes.
        rule: How sizes are rounded up.
        most: So many programs are kept, those that were used last.
        build: Makes a program of a graph that was specialised at bounds; None: its parts do not
            serve smaller sizes.

    Attributes:
        reason: Why no program of this graph can be padded; empty if one can, as far as is known.
    """

    def __init__(
        self, graph: Graph, rule: Buckets, most: int, build: Callable[[Graph], Program | None]
    ):
        self.reason = ""
        self._symbols = Symbols(graph)
        self._rule = rule
        self._build = build
        self._programs: LRU[tuple[str, tuple[int, ...]], _Padded] = LRU(most)
        self._proofs: dict[str, Proof] = {}
        self._proven = ""

    def find(self, values: Sequence[Any]) -> Counted | None:
        """What runs calls of some sizes; None: they need an executable of their own.

        Args:
            values: One per placeholder of the graph.
        """
        if self.reason:
            return None
        sizes = self._symbols.read(values)
        mark = self._proven or self._proving(values)
        if self.reason:
            return None
        found = self._serving(mark, sizes)
        if found is not None and not self._proven:
            for block in found.program.blocks:
                block.verify_again()
        found = found or self._made(mark, sizes, values)
        if found is None:
            return None
        whole = all(found.bounds[s] == n for s, n in sizes.items())
        return Counted(found.program, math.inf if whole else self._rule.exact_after)

    def _proving(self, values: Sequence[Any]) -> str:
        """The fingerprint of the graph for these sizes."""
        graph = self._symbols.specialized(values)
        PASSES(graph)
        if has_forgotten(graph):
            self.reason = FORGOTTEN
        mark = fingerprint(graph, ranged=True)
        if mark in self._proofs:
            self._proofs[mark].add(graph)
        else:
            self._proofs[mark] = Proof(graph)
        if self._proofs[mark].is_proven:
            self._proven = mark
        return mark

    def _serving(self, mark: str, sizes: Sizes) -> _Padded | None:
        """The program that wastes least, if it does not waste more than a new one might."""
        suitable = [p for p in self._programs.values() if p.mark == mark]
        best = min(suitable, key=lambda p: p.waste(sizes), default=None)
        allowed = max(self._rule.growth ** len(sizes), _waste(self._bounds(sizes), sizes))
        if best is None or best.waste(sizes) > allowed:
            return None
        return self._programs.get((mark, tuple(best.bounds.values())))

    def _bounds(self, sizes: Sizes) -> Sizes:
        growth, most = self._rule.growth, self._symbols.most
        return {
            s: round_up(n, growth, most[s]) if s in most else n  # not the size of a dimension
            for s, n in sizes.items()
        }

    def _made(self, mark: str, sizes: Sizes, values: Sequence[Any]) -> _Padded | None:
        """A new program; None if the passes make another graph for its bounds."""
        bounds = self._bounds(sizes)
        graph = self._symbols.specialized(self._symbols.arguments(values, bounds))
        PASSES(graph)
        if fingerprint(graph, ranged=True) != mark:
            log.info("sizes %s are not padded to %s: the graph is another one", sizes, bounds)
            return None
        cap(graph)
        try:
            program = self._build(graph)
        except NotPaddedError as error:
            self.reason = str(error)
            return None
        if program is None:
            self.reason = IN_PARTS
            return None
        made = _Padded(program, bounds, mark)
        self._programs.put((mark, tuple(bounds.values())), made)
        return made
