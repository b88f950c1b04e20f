"""Makes tables of explanations with rich: candidates, and what served dynamic shapes."""

import io
from collections.abc import Iterable, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_backends.interface.report import CandidateReport, GraphReport, ServedCalls


class RichRenderable:
    """A mixin that prints as text and shows as HTML in notebooks, through rich."""

    def __rich__(self) -> RenderableType:
        """Returns what rich renders."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Returns it as plain text, without colours."""
        console = _console()
        console.print(self)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def _repr_html_(self) -> str:
        """Returns it for Jupyter, in the page's own colours of text and background."""
        console = _console()
        console.print(self)
        return console.export_html(inline_styles=True, code_format=_PREFORMATTED)


_WIDTH = 110
_PREFORMATTED = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">{code}</pre>"
)


def _console() -> Console:
    return Console(
        file=io.StringIO(),
        width=_WIDTH,
        record=True,
        force_jupyter=False,
        color_system="truecolor",
        legacy_windows=False,
    )


def candidates_table(report: GraphReport) -> Table:
    """Makes a rich table with one row per autotune candidate of a report."""
    return make_candidates_table(report.candidates, report.chosen)


def make_candidates_table(rows: Iterable[CandidateReport], chosen: str) -> Table:
    """Makes a rich table of candidates: times, error, and why each was not chosen.

    Args:
        rows: The candidates.
        chosen: The one that runs the graph now.
    """
    rows = list(rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    several = any(row.graph for row in rows)
    for name in ("candidate", "of") if several else ("candidate",):
        table.add_column(name, overflow="fold")
    measured = any(row.measured for row in rows)
    figures = ("compile s", "verify s", "race s", "error", "ms", "× eager")
    for name in (*figures, *["held-out"] * measured):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not", overflow="fold")
    for row in rows:
        about = [row.graph or "graph"] if several else []
        found = [format_measurements(row.measured, "\n") or "-"] if measured else []
        table.add_row(row.name, *about, *_figures(row), *found, _why(row, chosen))
    return table


def format_measurements(measured: Mapping[str, float], between: str = ", ") -> str:
    """Formats what was measured on held-out batches, such as "cosine 0.9987"."""
    return between.join(f"{name} {value:.4g}" for name, value in measured.items())


def format_tuning_seconds(rows: Iterable[CandidateReport], others: Mapping[str, float]) -> str:
    """Formats the seconds that tuning spent compiling, verifying and racing, in one line.

    Args:
        rows: The candidates.
        others: What is none's (see `GraphReport.tuning_seconds`).
    """
    rows = list(rows)
    spent = {
        **others,
        "compile": sum(row.compile_s or 0.0 for row in rows),
        "verify": sum(row.verify_s or 0.0 for row in rows),
        "race": sum(row.race_s or 0.0 for row in rows),
    }
    return "tuning took: " + ", ".join(f"{name} {s:.2f} s" for name, s in spent.items())


def _figures(row: CandidateReport) -> list[str]:
    return [
        *("-" if s is None else f"{s:.1f}" for s in (row.compile_s, row.verify_s, row.race_s)),
        "-" if row.error is None else f"{row.error:.0e}",
        "-" if row.seconds is None else f"{row.seconds * 1e3:.3g}",
        "-" if row.speedup is None else f"{row.speedup[0]:.2f}",
    ]


def _why(row: CandidateReport, chosen: str) -> str:
    if row.reason:
        return row.reason
    if row.graph or row.name in chosen.split(", "):
        return "[bold]chosen[/]"
    return "chosen, and failed later"


_LISTED = 20


def traffic_table(served: Iterable[ServedCalls]) -> Table:
    """Makes a rich table of programs and eager reasons by number of calls, most used first.

    Args:
        served: The counts of one graph.
    """
    rows = sorted(served, key=lambda row: -row.calls)
    table = Table("served by", "for", "calls", "executables", "compiled in", box=None)
    for row in rows[:_LISTED]:
        table.add_row(
            row.by,
            Text(", ".join(row.shapes)),  # "[s0, 8]" is no markup
            str(row.calls),
            str(row.executables) if row.executables else "",
            f"{row.seconds:.2f} s" if row.seconds else "",
        )
    rest = rows[_LISTED:]
    if rest:
        calls, executables = sum(r.calls for r in rest), sum(r.executables for r in rest)
        seconds = f"{sum(r.seconds for r in rest):.2f} s"
        table.add_row(f"{len(rest)} more", "", str(calls), str(executables), seconds)
    return table
