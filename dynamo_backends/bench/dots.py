"""Where the dots of a plot lie: every round of every backend on a model."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_backends.bench.cells import EAGER, Cell, Outcome, Run, as_ratio, short
from dynamo_backends.bench.summary import in_words

WIDTH = 360
"""Of a panel, in units of its own: no more than a phone has points."""

_LEFT, _RIGHT, _TOP, _ROW, _BOTTOM = 14, 14, 4, 34, 20
_TICKS = (1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Line:
    """A backend's dots.

    Attributes:
        label: Its name and result.
        y: Of the dots.
        label_y: Of the label's base line.
        dots: Path of points, to be stroked with round caps.
        low: Where the interval begins; None without one.
        high: Where it ends.
        middle: Where the ratio of medians is.
        failed: It does not pass.
    """

    label: str
    y: float
    label_y: float
    dots: str = ""
    low: float | None = None
    high: float | None = None
    middle: float | None = None
    failed: bool = False


@dataclass(frozen=True)
class Panel:
    """A model's plot.

    Attributes:
        title: The model, and mode, dtype and batch where a run has several.
        width: Of the drawing.
        height: Of the drawing.
        lines: One per backend.
        ticks: Position and text of each.
        one: Where a backend is as fast as eager.
        summary: The same in words, for whoever does not see it.
    """

    title: str
    width: int
    height: int
    lines: list[Line]
    ticks: list[tuple[float, str]]
    one: float
    summary: str


def panels(run: Run) -> list[Panel]:
    """A panel for each model in each mode, dtype and batch size."""
    kinds = {(c.mode, c.dtype, c.batch) for c in run.outcomes}
    groups: dict[tuple[str, str], list[tuple[Cell, Outcome]]] = {}
    for cell, outcome in run.outcomes.items():
        kind = in_words((cell.mode, cell.dtype, cell.batch)) if len(kinds) > 1 else ""
        groups.setdefault((cell.model, kind), []).append((cell, outcome))
    return [_panel(": ".join(filter(None, key)), found) for key, found in groups.items()]


@dataclass(frozen=True)
class _Scale:
    """Logarithmic, from the smallest to the largest value and 1."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)


def _panel(title: str, found: Sequence[tuple[Cell, Outcome]]) -> Panel:
    ratios = {id(o): _ratios(o) for _, o in found}
    ends = [e for _, o in found if o.passed and o.speedup for e in (o.speedup.low, o.speedup.high)]
    every = [1.0, *ends, *(r for values in ratios.values() for r in values)]
    scale = _Scale(min(every) / 1.05, max(every) * 1.05)
    lines = [_line(i, c, o, ratios[id(o)], scale) for i, (c, o) in enumerate(found)]
    height = _TOP + _ROW * len(lines) + _BOTTOM
    words = "; ".join(line.label for line in lines)
    return Panel(title, WIDTH, height, lines, _ticks(scale), scale(1.0), words)


def _ratios(outcome: Outcome) -> list[float]:
    """Eager's median over each round's time: how many times as fast as eager the round was."""
    if not outcome.passed or not outcome.eager_s:
        return []
    median = statistics.median(outcome.eager_s)
    return [median / own for own in outcome.backend_s]


def _line(i: int, cell: Cell, outcome: Outcome, ratios: Sequence[float], scale: _Scale) -> Line:
    top = _TOP + _ROW * i
    name = "eager against eager" if cell.backend == EAGER else short(cell.backend)
    speedup = outcome.speedup
    if not ratios or speedup is None:
        return Line(f"{name}: {outcome.status}", top + 24, top + 13, failed=True)
    text = f"{name}: {as_ratio(speedup.value)} [{as_ratio(speedup.low)}, {as_ratio(speedup.high)}]"
    y = top + 24
    dots = "".join(f"M{scale(r)} {y}h0" for r in ratios)
    low, high, middle = (scale(v) for v in (speedup.low, speedup.high, speedup.value))
    return Line(text, y, top + 13, dots, low, high, middle)


def _ticks(scale: _Scale) -> list[tuple[float, str]]:
    """At least 30 units apart, 1 always among them."""
    values = sorted({*_TICKS, *(1 / t for t in _TICKS)}, key=lambda v: abs(math.log(v)))
    found: list[tuple[float, str]] = []
    for value in values:
        if not scale.low <= value <= scale.high:
            continue
        x = scale(value)
        if all(abs(x - other) >= 30 for other, _ in found):
            found.append((x, f"{value:.2g}×" if value < 1 else f"{value:g}×"))
    return sorted(found)
