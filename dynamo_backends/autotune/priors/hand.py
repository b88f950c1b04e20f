"""What holds where nothing was learnt: written by hand.

After the tables of docs/autotune.md, which are of two cores of an AMD Zen 5 in float32; for
training after ResNet-18's step and docs/measured/training.json, of two cores of an Intel Xeon with
AVX-512.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from dynamo_backends.autotune.priors.described import Described

Family = Literal["convolutions", "products", "other"]

SPREAD = 0.5
"""Of the logarithm of a speedup: what is written by hand may be wrong by half."""


class Row(NamedTuple):
    """A candidate: seconds of compilation per call of the graph, and speedups over eager.

    Attributes:
        compile_s: Seconds per call.
        convolutions: In graphs whose work is mostly in convolutions.
        products: In those whose work is mostly in products and attention.
        other: In others, and where nothing is known of the graph.
    """

    compile_s: float
    convolutions: float
    products: float
    other: float


INFERENCE: Mapping[str, Row] = {
    "inductor_freezing": Row(0.1, 2.1, 1.9, 1.5),
    "ov": Row(0.03, 2.1, 1.85, 1.4),
    "onnxrt": Row(0.02, 1.9, 1.4, 1.5),
    "openxla": Row(0.04, 1.4, 1.4, 1.3),
    "inductor": Row(0.06, 1.4, 1.1, 1.4),
    "inductor_max_autotune": Row(0.3, 1.4, 1.1, 1.3),
    "split": Row(0.2, 1.1, 1.4, 1.2),
    "ofi": Row(0.01, 1.35, 1.0, 1.1),
    "ts_trace": Row(0.01, 1.05, 1.0, 1.05),
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

_INT8 = 1.4
"""Times as fast as in float32; not learnt from measurements."""

UNKNOWN = Row(0.05, 1.02, 1.02, 1.02)
"""Other packages' backends, and those that seldom win."""


def family_of(graph: Mapping[str, float]) -> Family:
    """Where the work of a graph is.

    Args:
        graph: See `graph_features`; may be empty.
    """
    if not graph or graph.get("flops", 0.0) == 0:
        return "other"
    products = graph.get("product_work", 0.0) + graph.get("attention_work", 0.0)
    return "convolutions" if graph.get("convolution_work", 0.0) > products else "products"


def row_of(name: str, kind: str = "inference") -> Row:
    """The row of a candidate; in bfloat16 as in float32.

    Args:
        name: "@bf16" after it makes no difference; in int8 more is expected, for more seconds.
        kind: Of graph, as `Described.kind`.
    """
    backend, _, precision = name.partition("@")
    row = ROWS.get(kind, INFERENCE).get(backend, UNKNOWN)
    return Row(2 * row[0], *(_INT8 * x for x in row[1:])) if "int8" in precision else row


def gain_of(name: str, described: Described) -> float:
    """The logarithm of the speedup over eager that is written in a candidate's row.

    Args:
        name: See `row_of`.
        described: The graph.
    """
    return math.log(getattr(row_of(name, described.kind), family_of(described.graph)))


def base_gain(name: str, described: Described) -> float:
    """As `gain_of`, but 0 for who has no row: what is learnt is added to it."""
    is_known = row_of(name, described.kind) is not UNKNOWN
    return gain_of(name, described) if is_known else 0.0
