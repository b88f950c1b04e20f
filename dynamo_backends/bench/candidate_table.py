"""Describes for pages who competed for a graph, how fast and exact each was, why it lost."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_backends.autotune.options import EAGER
from dynamo_backends.bench.cells import as_ratio
from dynamo_backends.bench.dot_plots import ErrorPanel, Panel, Series, error_panel, panel, ratios_of
from dynamo_backends.bench.explained import break_even
from dynamo_backends.capture.rendering import format_tuning_seconds
from dynamo_backends.interface.report import CandidateReport

Shown = tuple[str, Any, str]
"""Text of a table's cell, what it is sorted by, and its class."""

HEADS = (
    ("candidate", "Who competed", True),
    ("× eager", "Median time of eager divided by the candidate's median time", False),
    ("why not", "Why it does not run the graph", True),
    ("from", "Lower end of the 95% confidence interval", False),
    ("to", "Upper end", False),
    ("ms", "Median of a call", False),
    ("error", "Root mean square error against float64, relative to the output", False),
    ("compile s", "Compilation and first call", False),
    ("pays off after", "Number of calls after which compilation has paid for itself", False),
    ("verify s", "Comparison with eager", False),
    ("race s", "Time spent measuring, including pauses", False),
)


@dataclass(frozen=True)
class CandidateTable:
    """The backends that competed for a graph, as rows of a table and plots.

    Attributes:
        title: What was competed for.
        rows: Rows of the table, with the columns of `HEADS`.
        panel: The rounds of the race; None if there was none.
        errors: None if nobody was compared.
        seconds: Where the time of tuning went.
    """

    title: str
    rows: list[list[Shown]]
    panel: Panel | None
    errors: ErrorPanel | None
    seconds: str


def candidate_table(
    rows: Sequence[CandidateReport], chosen: str, seconds: Mapping[str, float], title: str = ""
) -> CandidateTable:
    """Builds the table of the backends that competed for a graph.

    Args:
        rows: The candidates.
        chosen: Who runs the graph now.
        seconds: See `GraphReport.tuning_seconds`.
        title: What was competed for.
    """
    eager = next((row for row in rows if row.name == EAGER), None)
    errors = [
        (row.name, row.error, row.reason.startswith("wrong"))
        for row in rows
        if row.error is not None
    ]
    return CandidateTable(
        title,
        [_shown(row, eager, chosen) for row in rows],
        _race(rows, eager),
        error_panel(errors),
        format_tuning_seconds(rows, seconds),
    )


def reason(row: CandidateReport, chosen: str) -> str:
    """Returns why a candidate does not run the graph, or that it does."""
    if row.reason:
        return row.reason
    runs = row.graph or row.name in chosen.split(", ")
    return "chosen" if runs else "chosen, but failed later"


def pays_off(row: CandidateReport, eager: CandidateReport | None) -> float | None:
    """Formats the number of calls after which compilation has paid for itself."""
    if eager is None or row is eager or row.seconds is None or eager.seconds is None:
        return None
    return break_even(row.compile_s, eager.seconds, row.seconds)


def calls_text(calls: float | None) -> str:
    """Returns a number of calls for people."""
    if calls is None:
        return "-"
    if math.isinf(calls):
        return "never"
    return f"{calls:,.0f} call{'' if calls == 1 else 's'}"


def _race(rows: Sequence[CandidateReport], eager: CandidateReport | None) -> Panel | None:
    if eager is None or not eager.rounds:
        return None
    raced = [row for row in rows if row.rounds and row.speedup is not None]
    found = [Series(row.name, ratios_of(eager.rounds, row.rounds), row.speedup) for row in raced]
    return panel("", found)


def _shown(row: CandidateReport, eager: CandidateReport | None, chosen: str) -> list[Shown]:
    ratio = row.speedup or (None, None, None)
    why = reason(row, chosen)
    calls = pays_off(row, eager)
    return [
        (row.name, row.name, "words"),
        number(ratio[0], as_ratio),
        (why, why, f"words long{' good' if why == 'chosen' else ''}"),
        *(number(x, as_ratio) for x in ratio[1:]),
        number(None if row.seconds is None else row.seconds * 1e3, short_number),
        number(row.error, lambda x: f"{x:.0e}" if x else "0"),
        number(row.compile_s),
        (calls_text(calls), "" if calls is None else calls, ""),
        number(row.verify_s, "{:.2f}".format),
        number(row.race_s, "{:.2f}".format),
    ]


def number(value: float | None, text: Any = "{:.1f}".format, kind: str = "") -> Shown:
    """Returns a cell with a number; "-" if it is not known."""
    return ("-", "", kind) if value is None else (text(value), value, kind)


def short_number(value: float) -> str:
    """Returns a number with three digits."""
    return f"{value:.3g}"


def median_ms(seconds: Sequence[float]) -> float | None:
    """Returns the median in milliseconds; None of nothing."""
    return statistics.median(seconds) * 1e3 if seconds else None
