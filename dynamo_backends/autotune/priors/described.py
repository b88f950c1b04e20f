"""A graph and a machine in numbers, by which candidates are predicted."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Described:
    """What a prediction is made from.

    Attributes:
        kind: Of graph: "inference", "forward", "backward", "training" or "step".
        ops: Number of calls in the graph.
        graph: See `graph_features`; empty: not known.
        machine: See `machine_features`; empty: not known.
    """

    kind: str = "inference"
    ops: int = 1
    graph: Mapping[str, float] = field(default_factory=dict)
    machine: Mapping[str, float] = field(default_factory=dict)
