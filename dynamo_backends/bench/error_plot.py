"""Errors against float64 beside what is allowed, on a logarithmic scale."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_backends.autotune.verify import REDUCED_TOLERANCE
from dynamo_backends.bench.dots import WIDTH
from dynamo_backends.verify.rule import TOLERANCE

_LEFT, _RIGHT, _TOP, _ROW, _BOTTOM = 14, 14, 4, 34, 20
_LOWEST, _HIGHEST = 1e-9, 1.0


@dataclass(frozen=True)
class ErrorLine:
    """A candidate's error.

    Attributes:
        label: Its name and error.
        y: Of the dot.
        label_y: Of the label's base line.
        x: Of the dot.
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
    """The plot.

    Attributes:
        width: Of the drawing.
        height: Of the drawing.
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
    """What is smaller or larger than the scale stands at its ends."""
    within = min(max(error if error == error else math.inf, _LOWEST), _HIGHEST)
    share = math.log(within / _LOWEST) / math.log(_HIGHEST / _LOWEST)
    return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)
