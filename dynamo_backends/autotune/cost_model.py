"""Predicts speedup and compile time of candidates before they are compiled.

`TABLE` is written by hand. `CostModel` corrects it by the decisions on this disk, and orders the
candidates; `CandidatePruner` leaves out those that are not worth a compilation. Predictions decide
only who is tried, and in which order: whoever is tried is measured.

Speedups of inference are the means of 41 graphs of 21 models, measured on two cores of
an AMD Zen 5 and of a Zen 4 in float32; those of training are of ResNet-18's step and of
docs/measured/training.json, of two cores of an Intel Xeon with AVX-512.
"""

import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dynamo_backends.autotune.decisions import Decision
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.interface.report import CandidateReport

_PRIOR_WEIGHT = 2.0  # in decisions
_FIXED_S = 0.3  # of any compilation
_QUICK = 8  # compilations that fit into the time: so short is one that comes first
_DECISIONS = 200  # the newest, which is enough to learn from
_DEVIATIONS = 2.0  # above what is expected: so fast few candidates are

Family = Literal["convolutions", "products", "other"]


@dataclass(frozen=True)
class GraphFeatures:
    """The features of a graph that the cost model predicts from.

    Attributes:
        kind: Kind of graph: "inference", "forward", "backward", "training" or "step".
        ops: Number of calls in the graph.
        work: See `graph_work`; empty: not known.
    """

    kind: str = "inference"
    ops: int = 1
    work: Mapping[str, float] = field(default_factory=dict)

    @property
    def dominant_family(self) -> Family:
        """Returns the kind of operator that has most FLOPs; "other" if none are counted."""
        if self.work.get("flops", 0.0) == 0:
            return "other"
        products = self.work.get("product_work", 0.0) + self.work.get("attention_work", 0.0)
        return "convolutions" if self.work.get("convolution_work", 0.0) > products else "products"


class PriorRow(NamedTuple):
    """A candidate's compile seconds per call and speedups, in the hand-written table.

    Attributes:
        compile_s: Seconds per call.
        convolutions: In graphs whose work is mostly in convolutions.
        products: In those whose work is mostly in products and attention.
        other: In others, and where nothing is known of the graph.
        spread: Standard deviation of the error of the speedup's logarithm.
    """

    compile_s: float
    convolutions: float
    products: float
    other: float
    spread: float = 0.5


INFERENCE: Mapping[str, PriorRow] = {
    "inductor_freezing": PriorRow(0.1, 2.05, 1.55, 1.5, 0.3),
    "ov": PriorRow(0.03, 1.85, 1.45, 1.4, 0.35),
    "onnxrt": PriorRow(0.02, 1.8, 1.2, 1.5, 0.3),
    "openxla": PriorRow(0.04, 1.4, 1.2, 1.3, 0.3),
    "inductor": PriorRow(0.06, 1.35, 1.1, 1.4, 0.2),
    "inductor_max_autotune": PriorRow(0.3, 1.4, 1.1, 1.3),
    "split": PriorRow(0.2, 1.1, 1.4, 1.2),
    "ofi": PriorRow(0.01, 1.35, 0.95, 1.1, 0.2),
    "ts_trace": PriorRow(0.01, 1.0, 1.0, 1.05, 0.2),
}

PARTS: Mapping[str, PriorRow] = {
    "inductor": PriorRow(0.06, 1.05, 1.1, 1.05),
    "inductor_freezing": PriorRow(0.06, 1.0, 1.1, 1.0),
    "openxla": PriorRow(0.04, 0.75, 1.1, 0.9),
    "onnxrt": PriorRow(0.02, 0.8, 1.1, 0.9),
    "ov": PriorRow(0.03, 0.8, 1.1, 0.9),
}
"""Forward graphs and backward graphs."""

STEPS: Mapping[str, PriorRow] = {
    "inductor": PriorRow(0.02, 1.3, 1.35, 1.1),
    "inductor_freezing": PriorRow(0.02, 1.0, 1.1, 1.0),
    "openxla": PriorRow(0.01, 0.85, 1.1, 0.7),
    "onnxrt": PriorRow(0.005, 0.5, 0.8, 0.7),
    "ov": PriorRow(0.005, 0.45, 0.8, 0.7),
}
"""Whole steps, of `inductor` and `openxla` in their own way, of others as functional graphs. Most
of their calls are an optimizer's, which compile fast."""

TRAINING: Mapping[str, PriorRow] = {
    "inductor": PriorRow(0.45, 1.05, 1.1, 1.0),
    "split": PriorRow(1.4, 1.0, 1.2, 1.0),
    "openxla": PriorRow(0.3, 0.75, 1.1, 0.9),
    "onnxrt": PriorRow(0.2, 0.8, 1.1, 0.9),
    "ov": PriorRow(0.2, 0.8, 1.1, 0.9),
}
"""Graphs of Dynamo's with their derivatives: a call stands for several."""

TABLE: Mapping[str, Mapping[str, PriorRow]] = {
    "inference": INFERENCE,
    "forward": PARTS,
    "backward": PARTS,
    "training": TRAINING,
    "step": STEPS,
}
"""By kind of graph."""

START_UP: Mapping[str, tuple[str, float]] = {
    **dict.fromkeys(
        ("inductor", "inductor_freezing", "inductor_max_autotune", "split"),
        ("torch._inductor.codegen.cpp", 9.0),
    ),
    "openxla": ("jax", 1.5),
    "onnxrt": ("onnxscript", 1.5),
    "ov": ("openvino", 1.0),
}
"""A module that is imported once the candidate has compiled something in this process, and the
seconds that its first compilation takes in addition: imports, and Inductor's look at the C++
compiler."""

UNKNOWN = PriorRow(0.05, 1.02, 1.02, 1.02, math.inf)
"""Other packages' backends, and those that seldom win."""

_INT8 = 1.4
"""Times as fast as in float32; nothing is recorded."""


@dataclass(frozen=True)
class PriorEstimate:
    """What the hand-written table says of a candidate for one graph.

    Attributes:
        compile_s: Seconds of compilation per call of the graph.
        gain: Logarithm of its speedup over eager.
        spread: Standard deviation of the error of `gain`; infinite: nothing is known.
    """

    compile_s: float
    gain: float
    spread: float


class Prior:
    """Estimates compile time and speedup from a hand-written table, before any tuning.

    Args:
        rows: By kind of graph and name of the candidate.
    """

    def __init__(self, rows: Mapping[str, Mapping[str, PriorRow]] = TABLE):
        self._rows = rows

    def estimate(self, name: str, graph: GraphFeatures) -> PriorEstimate:
        """Looks up a candidate's compile time per call and its speedup.

        Args:
            name: Of the candidate. "@bf16" after it makes no difference; in int8 more is expected,
                for more seconds.
            graph: The graph.
        """
        backend, _, precision = name.partition("@")
        row = self._rows.get(graph.kind, INFERENCE).get(backend, UNKNOWN)
        seconds, speedup = row.compile_s, getattr(row, graph.dominant_family)
        if "int8" in precision:
            seconds, speedup = 2 * seconds, _INT8 * speedup
        return PriorEstimate(seconds, math.log(speedup), row.spread)


def graph_similarity(one: GraphFeatures, other: GraphFeatures) -> float:
    """Returns the weight, 0 to 1, of one graph's measurements in predictions for another."""
    of_kind = 1.0 if one.kind == other.kind else _OTHER_KIND
    return of_kind * (1.0 if one.dominant_family == other.dominant_family else _OTHER_FAMILY)


_OTHER_KIND = 0.3  # an inference graph says something of a training graph, too
_OTHER_FAMILY = 0.1


@dataclass(frozen=True)
class Prediction:
    """A candidate's predicted compile seconds, speedup, and chance to be right.

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
    def expected_gain(self) -> float:
        """Returns the log of the speedup times the chance to be right: the order of trials."""
        return self.chances * math.log(max(self.speedup, 1e-3))

    @property
    def max_speedup(self) -> float:
        """Returns an upper bound of the speedup: two standard deviations above it."""
        return self.speedup * math.exp(_DEVIATIONS * self.spread)


class CostModel:
    """Predicts compile time and speedup from the table and this machine's decisions.

    Args:
        decisions: On this machine, the newest first.
        graph: The graph.
        prior: What is known without them.
    """

    def __init__(
        self,
        decisions: Iterable[Decision],
        graph: GraphFeatures | None = None,
        prior: Prior | None = None,
    ):
        self._graph = graph or GraphFeatures()
        self._prior = prior or Prior()
        self._predicted: dict[str, Prediction] = {}
        self._past: dict[str, list[tuple[GraphFeatures, float, CandidateReport]]] = {}
        for decision in list(decisions)[:_DECISIONS]:
            self._learn(decision)

    def _learn(self, decision: Decision) -> None:
        past = GraphFeatures(decision.graph, decision.ops, decision.features)
        weight = graph_similarity(self._graph, past)
        for row in decision.candidates:
            if row.compile_s is not None:
                self._past.setdefault(row.name, []).append((past, weight, row))

    def predict(self, name: str) -> Prediction:
        """Predicts a candidate's compile time and speedup for the graph; cached."""
        if name not in self._predicted:
            self._predicted[name] = self._predict(name)
        return self._predicted[name]

    def _predict(self, name: str) -> Prediction:
        expected = self._prior.estimate(name, self._graph)
        past = self._past.get(name, [])
        factors = [
            self._times_as_long(name, graph, row)
            for graph, _, row in past
            if self._seconds(name, graph) >= _start_up(name)[1] / 2  # else it says little
        ]
        factor = statistics.median(factors) if factors else 1.0
        errors = [
            (weight, _gain(row) - self._prior.estimate(name, graph).gain)
            for graph, weight, row in past
            if row.speedup is not None
        ]
        worked = [(weight, float(row.seconds is not None)) for _, weight, row in past]
        gain = expected.gain + _blend(errors, 0.0)
        return Prediction(
            _FIXED_S + factor * self._seconds(name, self._graph) + _still_to_start_s(name),
            math.exp(gain),
            _blend(worked, 1.0),
            expected.spread,
        )

    def _times_as_long(self, name: str, graph: GraphFeatures, row: CandidateReport) -> float:
        """Returns how many times as long as expected a compilation took."""
        expected = self._seconds(name, graph) + _start_up(name)[1]  # it may have been the first
        return max((row.compile_s or 0.0) - _FIXED_S, 0.0) / expected

    def _seconds(self, name: str, graph: GraphFeatures) -> float:
        """Returns the seconds that the calls of a graph are expected to take."""
        return self._prior.estimate(name, graph).compile_s * max(graph.ops, 1)

    def rank_candidates(self, names: Sequence[str], within_s: float = math.inf) -> list[str]:
        """Sorts candidates by expected gain; those that cannot compile in time come last.

        Those that take a small part of the time come before the others, for a first answer. Those
        that cannot be compiled in time come last, by what they promise for each second: several
        that end in time may find more than the one that takes all of it.

        Args:
            names: Names of candidates.
            within_s: Seconds that there are for compiling.
        """

        def rank(name: str) -> tuple[bool, bool, float]:
            expected = self.predict(name)
            late, long = (expected.compile_s > s for s in (within_s, within_s / _QUICK))
            return late, long, -expected.expected_gain / (expected.compile_s if late else 1.0)

        return sorted(names, key=rank)


def _start_up(name: str) -> tuple[str, float]:
    return START_UP.get(name.partition("@")[0], ("", 0.0))


def _still_to_start_s(name: str) -> float:
    module, seconds = _start_up(name)
    return 0.0 if module in sys.modules else seconds


def _gain(row: CandidateReport) -> float:
    assert row.speedup is not None
    return math.log(max(row.speedup[0], 1e-3))


def _blend(found: Sequence[tuple[float, float]], prior: float) -> float:
    """Returns the weighted mean of measurements and of the prior value."""
    total = sum(weight for weight, _ in found)
    return (sum(w * x for w, x in found) + _PRIOR_WEIGHT * prior) / (total + _PRIOR_WEIGHT)


class CandidatePruner:
    """Skips candidates whose best expected speedup is below that of another one.

    What is expected may be wrong. So who was left out because the best one was expected to be
    faster than it turned out to be has its turn after the first measurement.

    Args:
        model: What to expect of whom.
        options: Of autotune. All candidates that they name are worth it, and all where memory is
            the objective.
    """

    def __init__(self, model: CostModel, options: AutotuneOptions):
        self._model = model
        self._all = bool(options.candidates) or options.objective == "memory"
        self._left_out: dict[str, float] = {}
        self._measured = 0.0

    def why_refused(self, name: str, right: Collection[str]) -> str:
        """Returns why a candidate is skipped; "" if it is tried.

        Args:
            name: Name of the candidate.
            right: Names of those that were proven right.
        """
        self._left_out.pop(name, None)
        if self._all or not right:
            return ""
        best = self._measured or max(self._model.predict(other).speedup for other in right)
        at_most = self._model.predict(name).max_speedup
        if at_most >= best:
            return ""
        self._left_out[name] = at_most
        return (
            f"not tried: its predicted speedup over eager is at most {at_most:.2f}, and that of "
            f"{'the best one is' if self._measured else 'another one'} {best:.2f}"
        )

    def note_best_speedup(self, speedup: float) -> list[str]:
        """Notes the best measured speedup; returns skipped candidates that may exceed it.

        Args:
            speedup: Over eager, of the fastest candidate that is right, at least 1.
        """
        self._measured = speedup
        return [name for name, at_most in self._left_out.items() if at_most > speedup]
