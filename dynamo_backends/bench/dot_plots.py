"""Plots: every round of every candidate beside eager, and errors against float64."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_backends.bench.cells import EAGER, Cell, Outcome, Run, as_ratio, short
from dynamo_backends.bench.summary import describe_mode
from dynamo_backends.verify.comparator import REDUCED_TOLERANCE, TOLERANCE

WIDTH = 360
"""Of a panel, in units of its own: no more than a phone has points."""

_LEFT, _RIGHT, _TOP, _ROW, _BOTTOM = 14, 14, 4, 34, 20
_TICKS = (1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Line:
    """The dots of one candidate.

    Attributes:
        label: Its name and result.
        y: Y of the dots.
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
    """The plot of a graph's candidates.

    Attributes:
        title: Such as the model, and mode, dtype and batch where a run has several.
        width: Width of the drawing.
        height: Height of the drawing.
        lines: One per candidate.
        ticks: Position and text of each.
        one: Where a candidate is as fast as eager.
        summary: The same in words, for whoever does not see it.
    """

    title: str
    width: int
    height: int
    lines: list[Line]
    ticks: list[tuple[float, str]]
    one: float
    summary: str


@dataclass(frozen=True)
class Series:
    """The samples of one candidate in a plot.

    Attributes:
        name: Its name.
        ratios: For each round, how many times as fast as eager it was.
        speedup: Ratio of medians and the ends of its interval; None without.
        failure: Why there is none, in a word.
    """

    name: str
    ratios: Sequence[float] = ()
    speedup: tuple[float, float, float] | None = None
    failure: str = ""


def panels(run: Run) -> list[Panel]:
    """A panel for each model in each mode, dtype and batch size; none of a run without times."""
    if run.context.get("accuracy"):
        return []
    kinds = {(c.mode, c.dtype, c.batch) for c in run.outcomes}
    groups: dict[tuple[str, str], list[Series]] = {}
    for cell, outcome in run.outcomes.items():
        kind = describe_mode((cell.mode, cell.dtype, cell.batch)) if len(kinds) > 1 else ""
        groups.setdefault((cell.model, kind), []).append(_series(cell, outcome))
    return [panel(": ".join(filter(None, key)), found) for key, found in groups.items()]


def panel(title: str, found: Sequence[Series]) -> Panel:
    """Returns one plot of speedups: a row of dots for each candidate."""
    ends = [end for series in found for end in series.speedup or ()]
    every = [1.0, *ends, *(ratio for series in found for ratio in series.ratios)]
    scale = _Scale(min(every) / 1.05, max(every) * 1.05)
    lines = [_line(i, series, scale) for i, series in enumerate(found)]
    height = _TOP + _ROW * len(lines) + _BOTTOM
    words = "; ".join(line.label for line in lines)
    return Panel(title, WIDTH, height, lines, _ticks(scale), scale(1.0), words)


def ratios_of(eager_s: Sequence[float], own_s: Sequence[float]) -> list[float]:
    """Eager's median over each round's time: how many times as fast as eager the round was."""
    if not eager_s:
        return []
    median = statistics.median(eager_s[: len(own_s)] or eager_s)
    return [median / own for own in own_s if own]


def _series(cell: Cell, outcome: Outcome) -> Series:
    name = "eager against eager" if cell.backend == EAGER else short(cell.backend)
    found, ratios = outcome.speedup, ratios_of(outcome.eager_s, outcome.backend_s)
    if not outcome.passed or not ratios or found is None:
        return Series(name, failure=outcome.status)
    return Series(name, ratios, (found.value, found.low, found.high))


@dataclass(frozen=True)
class _Scale:
    """Logarithmic, from the smallest to the largest value and 1."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)


def _line(i: int, series: Series, scale: _Scale) -> Line:
    top, found = _TOP + _ROW * i, series.speedup
    y = top + 24
    if found is None:
        return Line(f"{series.name}: {series.failure}", y, top + 13, failed=True)
    value, low, high = found
    text = f"{series.name}: {as_ratio(value)} [{as_ratio(low)}, {as_ratio(high)}]"
    dots = "".join(f"M{scale(r)} {y}h0" for r in series.ratios)
    return Line(text, y, top + 13, dots, scale(low), scale(high), scale(value))


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


_LEFT, _RIGHT, _TOP, _ROW, _BOTTOM = 14, 14, 4, 34, 20
_LOWEST, _HIGHEST = 1e-9, 1.0


@dataclass(frozen=True)
class ErrorLine:
    """The error of one candidate.

    Attributes:
        label: Its name and error.
        y: Y of the dot.
        label_y: Of the label's base line.
        x: X of the dot.
        limit: Where its tolerance is.
        failed: Its results are wrong.
    """

    label: str
    y: float
    label_y: float
    x: float
    limit: float
    failed: bool


@dataclass(frozen=True)
class ErrorPanel:
    """The plot of candidates' errors.

    Attributes:
        width: Width of the drawing.
        height: Height of the drawing.
        lines: One per candidate.
        ticks: Position and text of each.
        summary: The same in words, for whoever does not see it.
    """

    width: int
    height: int
    lines: list[ErrorLine]
    ticks: list[tuple[float, str]]
    summary: str


def error_panel(errors: Sequence[tuple[str, float, bool]]) -> ErrorPanel | None:
    """Returns a plot of errors; None if there are none.

    Args:
        errors: Name, error and whether the results are wrong, of each candidate. What ends in
            "@bf16" has the tolerance of bfloat16; what is in int8 is left out, since its user
            states what is admitted.
    """
    errors = [row for row in errors if "@int8" not in row[0]]
    if not errors:
        return None
    lines = []
    for i, (name, error, failed) in enumerate(errors):
        top = _TOP + _ROW * i
        limit = REDUCED_TOLERANCE if name.endswith("@bf16") else TOLERANCE
        label = f"{name}: {error:.1e}" if error else f"{name}: 0"
        lines.append(ErrorLine(label, top + 24, top + 13, _x(error), _x(limit), failed))
    ticks = [(_x(10.0**power), f"1e{power}") for power in range(-8, 1, 2)]
    words = "; ".join(line.label for line in lines)
    return ErrorPanel(WIDTH, _TOP + _ROW * len(lines) + _BOTTOM, lines, ticks, words)


def _x(error: float) -> float:
    """Returns what is smaller or larger than the scale stands at its ends."""
    within = min(max(error if error == error else math.inf, _LOWEST), _HIGHEST)
    share = math.log(within / _LOWEST) / math.log(_HIGHEST / _LOWEST)
    return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)
