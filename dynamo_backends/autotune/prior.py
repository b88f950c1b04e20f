"""What autotune expects of candidates before anything is compiled: a table written by hand.

Speedups of inference are the means of 41 graphs of 21 models, measured on two cores of
an AMD Zen 5 and of a Zen 4 in float32; those of training are of ResNet-18's step and of
docs/measured/training.json, of two cores of an Intel Xeon with AVX-512.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Family = Literal["convolutions", "products", "other"]


@dataclass(frozen=True)
class GraphDescription:
    """A graph, as far as predictions depend on it.

    Attributes:
        kind: Of graph: "inference", "forward", "backward", "training" or "step".
        ops: Number of calls in the graph.
        work: See `graph_work`; empty: not known.
    """

    kind: str = "inference"
    ops: int = 1
    work: Mapping[str, float] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        """The kind of call that most FLOPs are in."""
        if self.work.get("flops", 0.0) == 0:
            return "other"
        products = self.work.get("product_work", 0.0) + self.work.get("attention_work", 0.0)
        return "convolutions" if self.work.get("convolution_work", 0.0) > products else "products"


class Row(NamedTuple):
    """A candidate: seconds of compilation per call of the graph, and speedups over eager.

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


INFERENCE: Mapping[str, Row] = {
    "inductor_freezing": Row(0.1, 2.05, 1.55, 1.5, 0.3),
    "ov": Row(0.03, 1.85, 1.45, 1.4, 0.35),
    "onnxrt": Row(0.02, 1.8, 1.2, 1.5, 0.3),
    "openxla": Row(0.04, 1.4, 1.2, 1.3, 0.3),
    "inductor": Row(0.06, 1.35, 1.1, 1.4, 0.2),
    "inductor_max_autotune": Row(0.3, 1.4, 1.1, 1.3),
    "split": Row(0.2, 1.1, 1.4, 1.2),
    "ofi": Row(0.01, 1.35, 0.95, 1.1, 0.2),
    "ts_trace": Row(0.01, 1.0, 1.0, 1.05, 0.2),
}

PARTS: Mapping[str, Row] = {
    "inductor": Row(0.06, 1.05, 1.1, 1.05),
    "inductor_freezing": Row(0.06, 1.0, 1.1, 1.0),
    "openxla": Row(0.04, 0.75, 1.1, 0.9),
    "onnxrt": Row(0.02, 0.8, 1.1, 0.9),
    "ov": Row(0.03, 0.8, 1.1, 0.9),
}
"""Forward graphs and backward graphs."""

STEPS: Mapping[str, Row] = {
    "inductor": Row(0.02, 1.3, 1.35, 1.1),
    "inductor_freezing": Row(0.02, 1.0, 1.1, 1.0),
    "openxla": Row(0.01, 0.85, 1.1, 0.7),
    "onnxrt": Row(0.005, 0.5, 0.8, 0.7),
    "ov": Row(0.005, 0.45, 0.8, 0.7),
}
"""Whole steps, of `inductor` and `openxla` in their own way, of others as functional graphs. Most
of their calls are an optimizer's, which compile fast."""

TRAINING: Mapping[str, Row] = {
    "inductor": Row(0.45, 1.05, 1.1, 1.0),
    "split": Row(1.4, 1.0, 1.2, 1.0),
    "openxla": Row(0.3, 0.75, 1.1, 0.9),
    "onnxrt": Row(0.2, 0.8, 1.1, 0.9),
    "ov": Row(0.2, 0.8, 1.1, 0.9),
}
"""Graphs of Dynamo's with their derivatives: a call stands for several."""

ROWS: Mapping[str, Mapping[str, Row]] = {
    "inference": INFERENCE,
    "forward": PARTS,
    "backward": PARTS,
    "training": TRAINING,
    "step": STEPS,
}
"""By kind of graph."""

UNKNOWN = Row(0.05, 1.02, 1.02, 1.02, math.inf)
"""Other packages' backends, and those that seldom win."""

_INT8 = 1.4
"""Times as fast as in float32; nothing is recorded."""


@dataclass(frozen=True)
class Expectation:
    """Predicted compile time and speedup of a candidate.

    Attributes:
        compile_s: Seconds of compilation per call of the graph.
        gain: Logarithm of its speedup over eager.
        spread: Standard deviation of the error of `gain`; infinite: nothing is known.
    """

    compile_s: float
    gain: float
    spread: float


class Prior:
    """Predicts candidates for a graph.

    Args:
        rows: By kind of graph and name of the candidate.
    """

    def __init__(self, rows: Mapping[str, Mapping[str, Row]] = ROWS):
        self._rows = rows

    def expect(self, name: str, graph: GraphDescription) -> Expectation:
        """Predicts the compile time and the speedup of a candidate.

        Args:
            name: Of the candidate. "@bf16" after it makes no difference; in int8 more is expected,
                for more seconds.
            graph: The graph.
        """
        backend, _, precision = name.partition("@")
        row = self._rows.get(graph.kind, INFERENCE).get(backend, UNKNOWN)
        seconds, speedup = row.compile_s, getattr(row, graph.family)
        if "int8" in precision:
            seconds, speedup = 2 * seconds, _INT8 * speedup
        return Expectation(seconds, math.log(speedup), row.spread)


def similarity(one: GraphDescription, other: GraphDescription) -> float:
    """Weighs measurements of one graph for another on the same machine: 0 to 1."""
    of_kind = 1.0 if one.kind == other.kind else _OTHER_KIND
    return of_kind * (1.0 if one.family == other.family else _OTHER_FAMILY)


_OTHER_KIND = 0.3  # an inference graph says something of a training graph, too
_OTHER_FAMILY = 0.1
