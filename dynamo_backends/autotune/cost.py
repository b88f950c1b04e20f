"""A simple model of what candidates cost and gain, learnt from past decisions.

What it predicts decides only the order in which candidates are tried and which are left out when
the budget ends; whoever is tried is measured.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo_backends.autotune.decisions import Decision

# Before anything was learnt: seconds of compilation per call of the graph, and speedup over eager.
_PRIOR: dict[str, tuple[float, float]] = {
    "onnxrt": (0.02, 1.5),
    "inductor": (0.06, 1.4),
    "openxla": (0.04, 1.3),
    "ov": (0.03, 1.4),
    "split": (0.2, 1.2),
    "inductor_freezing": (0.07, 1.3),
    "ofi": (0.01, 1.1),
    "ts_trace": (0.01, 1.05),
    "inductor_max_autotune": (0.3, 1.3),
}
_UNKNOWN = (0.05, 1.02)
_PRIOR_WEIGHT = 2.0  # in decisions
_FIXED_S = 0.3  # of any compilation


@dataclass(frozen=True)
class Prediction:
    """What is expected of a candidate.

    Attributes:
        compile_s: Seconds of compilation.
        speedup: Over eager.
        chances: Part of past trials in which it was right.
    """

    compile_s: float
    speedup: float
    chances: float

    @property
    def promise(self) -> float:
        """By what candidates are ordered: the expected gain, for those that work at all."""
        return self.chances * math.log(max(self.speedup, 1e-3))


class CostModel:
    """Predictions from past decisions.

    Args:
        decisions: On this machine.
    """

    def __init__(self, decisions: Iterable[Decision]):
        self._rates: dict[str, list[float]] = {}
        self._gains: dict[str, list[float]] = {}
        self._worked: dict[str, list[bool]] = {}
        for decision in decisions:
            self._learn(decision)

    def _learn(self, decision: Decision) -> None:
        for row in decision.candidates:
            if row.compile_s is not None:
                rate = max(row.compile_s - _FIXED_S, 0.0) / max(decision.ops, 1)
                self._rates.setdefault(row.name, []).append(rate)
            if row.speedup is not None:
                self._gains.setdefault(row.name, []).append(math.log(max(row.speedup[0], 1e-3)))
            if row.compile_s is not None:
                self._worked.setdefault(row.name, []).append(row.seconds is not None)

    def predict(self, name: str, ops: int) -> Prediction:
        """What to expect of a candidate for a graph with so many calls."""
        rate, gain = _PRIOR.get(name.partition("@")[0], _UNKNOWN)
        rates = self._rates.get(name, [])
        rate = statistics.median(rates) if rates else rate
        logarithm = _blend(self._gains.get(name, []), math.log(gain))
        chances = _blend([float(w) for w in self._worked.get(name, [])], 1.0)
        return Prediction(_FIXED_S + rate * ops, math.exp(logarithm), chances)

    def order(self, names: Sequence[str], ops: int) -> list[str]:
        """Names, the most promising first."""
        return sorted(names, key=lambda name: -self.predict(name, ops).promise)


def _blend(found: Sequence[float], prior: float) -> float:
    return (sum(found) + _PRIOR_WEIGHT * prior) / (len(found) + _PRIOR_WEIGHT)
