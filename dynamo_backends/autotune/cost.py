"""A model of what candidates cost and gain: what the prior says, and past decisions on this disk.

What it predicts decides only the order in which candidates are tried, and which are left out;
whoever is tried is measured.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo_backends.autotune.decisions import Decision
from dynamo_backends.autotune.prior import GraphDescription, Prior, similarity
from dynamo_backends.interface.report import CandidateReport

_PRIOR_WEIGHT = 2.0  # in decisions
_FIXED_S = 0.3  # of any compilation
_DECISIONS = 200  # the newest, which is enough to learn from
_DEVIATIONS = 2.0  # above what is expected: so fast few candidates are


@dataclass(frozen=True)
class Prediction:
    """What is expected of a candidate.

    Attributes:
        compile_s: Seconds of compilation.
        speedup: Over eager.
        chances: Part of past trials in which it was right.
        spread: Standard deviation of the error of the speedup's logarithm; infinite: not known.
    """

    compile_s: float
    speedup: float
    chances: float
    spread: float = math.inf

    @property
    def promise(self) -> float:
        """By what candidates are ordered: the expected gain, for those that work at all."""
        return self.chances * math.log(max(self.speedup, 1e-3))

    @property
    def at_most(self) -> float:
        """The speedup over eager that it will hardly exceed."""
        return self.speedup * math.exp(_DEVIATIONS * self.spread)


class CostModel:
    """Predictions for one graph.

    Args:
        decisions: On this machine, the newest first.
        graph: The graph.
        prior: What is known without them.
    """

    def __init__(
        self,
        decisions: Iterable[Decision],
        graph: GraphDescription | None = None,
        prior: Prior | None = None,
    ):
        self._graph = graph or GraphDescription()
        self._prior = prior or Prior()
        self._predicted: dict[str, Prediction] = {}
        self._past: dict[str, list[tuple[GraphDescription, float, CandidateReport]]] = {}
        for decision in list(decisions)[:_DECISIONS]:
            self._learn(decision)

    def _learn(self, decision: Decision) -> None:
        past = GraphDescription(decision.graph, decision.ops, decision.features)
        weight = similarity(self._graph, past)
        for row in decision.candidates:
            if row.compile_s is not None:
                self._past.setdefault(row.name, []).append((past, weight, row))

    def predict(self, name: str) -> Prediction:
        """Returns what to expect of a candidate."""
        if name not in self._predicted:
            self._predicted[name] = self._predict(name)
        return self._predicted[name]

    def _predict(self, name: str) -> Prediction:
        expected = self._prior.expect(name, self._graph)
        past = self._past.get(name, [])
        factors = [self._times_as_long(name, graph, row) for graph, _, row in past]
        factor = statistics.median(factors) if factors else 1.0
        errors = [
            (weight, _gain(row) - self._prior.expect(name, graph).gain)
            for graph, weight, row in past
            if row.speedup is not None
        ]
        worked = [(weight, float(row.seconds is not None)) for _, weight, row in past]
        gain = expected.gain + _blend(errors, 0.0)
        return Prediction(
            _FIXED_S + factor * expected.compile_s * max(self._graph.ops, 1),
            math.exp(gain),
            _blend(worked, 1.0),
            expected.spread,
        )

    def _times_as_long(self, name: str, graph: GraphDescription, row: CandidateReport) -> float:
        """Returns how many times as long as expected a compilation took."""
        took = max((row.compile_s or 0.0) - _FIXED_S, 0.0)
        return took / (self._prior.expect(name, graph).compile_s * max(graph.ops, 1))

    def order(self, names: Sequence[str], within_s: float = math.inf) -> list[str]:
        """Names, the most promising first.

        Those that cannot be compiled in time come last, by what they promise for each second:
        several that end in time may find more than the one that takes all of it.

        Args:
            names: Of candidates.
            within_s: Seconds that there are for compiling.
        """

        def rank(name: str) -> tuple[bool, float]:
            expected = self.predict(name)
            late = expected.compile_s > within_s
            return late, -expected.promise / (expected.compile_s if late else 1.0)

        return sorted(names, key=rank)


def _gain(row: CandidateReport) -> float:
    assert row.speedup is not None
    return math.log(max(row.speedup[0], 1e-3))


def _blend(found: Sequence[tuple[float, float]], prior: float) -> float:
    """The mean of what was found, with its weights, and of what was known before."""
    total = sum(weight for weight, _ in found)
    return (sum(w * x for w, x in found) + _PRIOR_WEIGHT * prior) / (total + _PRIOR_WEIGHT)
