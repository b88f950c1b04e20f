"""What was learnt from recorded decisions, as JSON: a kernel ridge regression for each candidate.

Recorded graphs are points. A prediction is what is written by hand (`hand.base_gain`), the mean
difference from that, and what the recorded graphs add that are close: each its weight times
exp(-d²/2), d the distance in scaled features. So a graph that is like none gets the mean.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

FORMAT = 2

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Learned:
    """What is known of one candidate in one kind of graph.

    Attributes:
        mean: Of the logarithm of its speedup over eager, less `hand.base_gain`.
        weights: What each recorded graph adds to that, by the graph's number.
        spread: Standard deviation of the error in graphs that it was not learnt from.
        right: Part of the recorded graphs in which it was right.
        compile_mean: Mean logarithm of seconds of compilation per call; None: not recorded.
        compile_weights: As `weights`.
    """

    mean: float
    weights: Mapping[int, float]
    spread: float
    right: float = 1.0
    compile_mean: float | None = None
    compile_weights: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """All of it.

    Attributes:
        scales: By which a graph's features are divided, after `centers` were subtracted.
        centers: Of a graph's features.
        width: Distance at which a recorded graph counts exp(-1/2).
        machine_scales: By which a machine's features are divided.
        machines: Those that graphs were recorded on.
        points: Features of the recorded graphs, scaled, in the order of `scales`.
        machine_of: For each of the graphs the number of its machine.
        candidates: By kind of graph and name.
        trained_on: How it was learnt, for people.
    """

    scales: Numbers
    centers: Numbers
    width: float
    machine_scales: Numbers
    machines: Sequence[Numbers]
    points: Sequence[Sequence[float]]
    machine_of: Sequence[int]
    candidates: Mapping[str, Mapping[str, Learned]]
    trained_on: str = ""

    def scaled(self, graph: Numbers) -> list[float]:
        """A graph's features as a point."""
        return [
            (graph.get(name, self.centers[name]) - self.centers[name]) / scale
            for name, scale in self.scales.items()
        ]

    def nearest_machine(self, machine: Numbers) -> int:
        """The number of the machine that is most like the given one."""
        distances = [_distance(machine, known, self.machine_scales) for known in self.machines]
        return min(range(len(distances)), key=distances.__getitem__)

    def strangeness(self, machine: Numbers) -> float:
        """Distance of the nearest recorded machine; 0: it is one of them."""
        near = self.machines[self.nearest_machine(machine)]
        return _distance(near, machine, self.machine_scales)

    def closeness(self, graph: Numbers, machine: Numbers) -> np.ndarray[Any, Any]:
        """How much each recorded graph counts, between 0 and 1.

        Args:
            graph: Features of a graph.
            machine: Of a machine; if none is like it, the nearest one stands for it.
        """
        near = self.machines[self.nearest_machine(machine)]
        apart = np.asarray([_distance(near, m, self.machine_scales) for m in self.machines])
        difference = np.asarray(self.points) - np.asarray(self.scaled(graph))
        squares = (difference**2).sum(axis=1) / self.width**2
        return np.exp(-squares / 2) * np.exp(-(apart[list(self.machine_of)] ** 2) / 2)

    def to_json(self) -> str:
        """As a file has it."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of `to_json`.

        Raises:
            ValueError: It is no such table, or one of another format.
        """
        given = json.loads(text)
        if not isinstance(given, dict) or given.pop("format", None) != FORMAT:
            raise ValueError(f"it is no table of the format {FORMAT}")
        kinds = given.pop("candidates")
        candidates = {
            kind: {name: _learned(row) for name, row in rows.items()}
            for kind, rows in kinds.items()
        }
        return cls(candidates=candidates, **given)

    @classmethod
    def read(cls, path: Path) -> Self:
        """A table in a file."""
        return cls.from_json(path.read_text(encoding="utf-8"))


def _learned(given: dict[str, Any]) -> Learned:
    for name in ("weights", "compile_weights"):
        given[name] = {int(point): float(weight) for point, weight in given[name].items()}
    return Learned(**given)


def added(closeness: np.ndarray[Any, Any], weights: Mapping[int, float]) -> float:
    """What the recorded graphs add to a mean."""
    return float(sum(closeness[point] * weight for point, weight in weights.items()))


def _distance(one: Numbers, other: Numbers, scales: Numbers) -> float:
    return math.sqrt(
        sum(((one.get(n, 0.0) - other.get(n, 0.0)) / scale) ** 2 for n, scale in scales.items())
    )
