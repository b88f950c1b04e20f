"""Predictions: from the table that comes with the package, and from what is written by hand."""

import functools
import logging
import math
from dataclasses import dataclass
from pathlib import Path

from dynamo_backends.autotune.priors import hand
from dynamo_backends.autotune.priors.described import Described
from dynamo_backends.autotune.priors.table import Table, added

TABLE = Path(__file__).parent / "table.json"

log = logging.getLogger("dynamo_backends")


@dataclass(frozen=True)
class Expectation:
    """What is expected of a candidate before anything is compiled.

    Attributes:
        compile_s: Seconds of compilation per call of the graph.
        gain: Logarithm of its speedup over eager.
        spread: Standard deviation of the error of `gain`; infinite: nothing is known.
        right: Part of graphs in which it is right.
    """

    compile_s: float
    gain: float
    spread: float
    right: float = 1.0


class Prior:
    """Predicts candidates for a graph.

    Args:
        table: What was learnt; None: what is written by hand is all.
    """

    def __init__(self, table: Table | None = None):
        self._table = table

    def expect(self, name: str, described: Described) -> Expectation:
        """What is expected of a candidate.

        Args:
            name: Of the candidate.
            described: The graph and the machine.
        """
        row = hand.row_of(name, described.kind)
        spread = hand.SPREAD if row is not hand.UNKNOWN else math.inf
        by_hand = Expectation(row.compile_s, hand.gain_of(name, described), spread)
        if self._table is None or not described.graph or not described.machine:
            return by_hand
        learned = self._table.candidates.get(described.kind, {}).get(name)
        if learned is None:
            return by_hand
        near = self._table.closeness(described.graph, described.machine)
        compile_s = row.compile_s
        if learned.compile_mean is not None:
            compile_s = math.exp(learned.compile_mean + added(near, learned.compile_weights))
        gain = hand.base_gain(name, described) + learned.mean + added(near, learned.weights)
        spread = learned.spread * (1 + self._table.strangeness(described.machine))
        return Expectation(compile_s, gain, spread, learned.right)

    def closeness(self, one: Described, other: Described) -> float:
        """How much what was seen of one graph says of another on the same machine: 0 to 1."""
        if one.kind != other.kind:
            return _OTHER_KIND
        if self._table is None or not one.graph or not other.graph:
            return 1.0
        pairs = zip(self._table.scaled(one.graph), self._table.scaled(other.graph), strict=True)
        squares = sum((a - b) ** 2 for a, b in pairs) / self._table.width**2
        return max(_ANY_GRAPH, math.exp(-squares / 2))


_OTHER_KIND = 0.3  # an inference graph says something of a training graph, too
_ANY_GRAPH = 0.1  # and so does any graph of any other


@functools.cache
def shipped() -> Prior:
    """That of the package."""
    try:
        return Prior(Table.read(TABLE))
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read, candidates are in another order: %s", TABLE, error)
        return Prior()
