"""A run as tables: for the terminal, and in columns for a page."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynamo_backends.bench.cells import Cell, Outcome, Run, as_ratio, short
from dynamo_backends.bench.summary import LEVEL, Summary, choices, chosen_text, summaries

Value = float | int | str | None


@dataclass(frozen=True)
class Column:
    """A column of the large table.

    Attributes:
        name: Its head.
        about: What it says, with the unit.
        value: What it is sorted by.
        text: How that is shown.
    """

    name: str
    about: str
    value: Callable[[Cell, Outcome], Value]
    text: Callable[[Value], str] = str

    def show(self, cell: Cell, outcome: Outcome) -> str:
        """Returns what stands in it; "-" if nothing is known."""
        value = self.value(cell, outcome)
        return "-" if value is None or value == "" else self.text(value)


def _fixed(digits: int) -> Callable[[Value], str]:
    return lambda value: f"{value:.{digits}f}"


def _ratio(value: Value) -> str:
    return as_ratio(float(value or 0.0))


def _short(value: Value) -> str:
    return f"{value:.3g}"


def _median_ms(samples: tuple[float, ...]) -> float | None:
    return statistics.median(samples) * 1e3 if samples else None


def _of_speedup(name: str) -> Callable[[Cell, Outcome], Value]:
    """Returns a part of it; nothing where the backend does not pass."""

    def value(cell: Cell, outcome: Outcome) -> Value:
        if outcome.speedup is None or not outcome.passed:
            return None
        found: float = getattr(outcome.speedup, name)
        return found

    return value


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor


PAGE_COLUMNS: tuple[Column, ...] = (
    Column("model", "Name in the suite", lambda c, o: c.model),
    Column("backend", "Backend that compiled it", lambda c, o: short(c.backend)),
    Column("mode", "Inference, training (forward and backward) or step", lambda c, o: c.mode),
    Column("dtype", "Dtype of weights and inputs", lambda c, o: c.dtype),
    Column("batch", "Examples per call; -: the suite's own", lambda c, o: c.batch),
    Column("status", "Status, as PyTorch's benchmark runners name it", lambda c, o: o.status),
    Column("speedup", "Eager's median time over the backend's, from the same rounds",
           _of_speedup("value"), _ratio),
    Column("from", "Lower end of the 95% confidence interval of the speedup",
           _of_speedup("low"), _ratio),
    Column("to", "Upper end of the 95% confidence interval of the speedup",
           _of_speedup("high"), _ratio),
    Column("p", "Wilcoxon signed-rank test: probability of such a difference by chance",
           _of_speedup("p"), _short),
    Column("eager ms", "Median of a call", lambda c, o: _median_ms(o.eager_s), _short),
    Column("ms", "Median of a call of the backend's", lambda c, o: _median_ms(o.backend_s), _short),
    Column("cold s", "Compilation and first call, caches empty",
           lambda c, o: o.compile_cold_s, _fixed(1)),
    Column("warm s", "Compilation and first call in a second process",
           lambda c, o: o.compile_warm_s, _fixed(1)),
    Column("memory", "Peak memory of a process that runs eager, divided by that of a process that "
                     "loads from the cache and runs the backend; below 1 the backend uses more",
           lambda c, o: o.memory_ratio, _fixed(2)),
    Column("ops", "Number of ATen calls that the backend runs, if it reports them",
           lambda c, o: o.ops_on_backend),
    Column("ops in eager", "Number of ATen calls in eager: left by the backend, or outside of "
                           "graphs",
           lambda c, o: o.ops_in_eager),
    Column("ms outside", "Time of the operators outside of Dynamo's graphs, per call",
           lambda c, o: _times(o.seconds_outside, 1e3), _short),
    Column("graphs", "Number of graphs that Dynamo captured", lambda c, o: o.graphs),
    Column("breaks", "Graph breaks", lambda c, o: o.breaks),
    Column("chosen", "Backends that run the graphs, where the backend chooses",
           lambda c, o: chosen_text(o.chosen)),
    Column("wrong", "Number of results that differ from eager's", lambda c, o: o.wrong),
    Column("executables", "Programs compiled for a stream of requests, if the backend reports them",
           lambda c, o: o.executables),
    Column("recompilations", "Number of graphs captured after the first request",
           lambda c, o: o.recompilations),
    Column("stream s", "All requests of a stream, caches empty",
           lambda c, o: o.stream_cold_s, _fixed(1)),
    Column("p50 ms", "Median time of a request once everything is compiled",
           lambda c, o: _times(o.p50_s, 1e3), _short),
    Column("p95 ms", "95th percentile of the time of a request",
           lambda c, o: _times(o.p95_s, 1e3), _short),
    Column("eager p50", "Median time of a request in eager, in ms",
           lambda c, o: _times(o.eager_p50_s, 1e3), _short),
    Column("eager p95", "95th percentile of the time of a request in eager, in ms",
           lambda c, o: _times(o.eager_p95_s, 1e3), _short),
    Column("load", "CPUs that other processes used meanwhile", lambda c, o: o.load, _fixed(2)),
)  # fmt: skip
"""In order."""


def summary_table(found: list[Summary]) -> Table:
    """Returns one line per backend and kind."""
    several = len({s.key[1:] for s in found}) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("backend")
    if several:
        table.add_column("")
    heads = ("pass", "pass rate", "x eager", "lowest", "faster", "slower", "cold s", "warm s",
             "memory")  # fmt: skip
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    for s in found:
        name = short(s.key[0])
        head = [name, s.kind] if several else [name]
        table.add_row(*head, *summary_cells(s))
    return table


def summary_cells(s: Summary) -> list[str]:
    """Returns what the terminal and the page show of a summary."""
    return [
        f"{s.passed}/{s.of}",
        "-" if s.pass_rate is None else f"{s.pass_rate:.1%}",
        "-" if s.speedup is None else as_ratio(s.speedup),
        "-" if s.lowest is None else f"{as_ratio(s.lowest[1])} {s.lowest[0]}",
        str(s.faster),
        str(s.slower),
        _shown(s.cold_s, 1),
        _shown(s.warm_s, 1),
        _shown(s.memory),
    ]


def _shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def print_summary(run: Run) -> Table:
    """Returns the table of a run for the terminal."""
    table = summary_table(summaries(run))
    said = f"faster, slower: than eager, p < {LEVEL:g} for all models together"
    table.caption = "\n".join([said, *choices(run)])
    return table


_ALWAYS = ("model", "backend", "status", "speedup")
_IF_DIFFERENT = ("mode", "dtype", "batch", "breaks", "ops in eager")


def columns(run: Run) -> list[Column]:
    """Returns the columns that say something about a run."""
    found = []
    for column in PAGE_COLUMNS:
        values = {column.value(cell, outcome) for cell, outcome in run.outcomes.items()}
        least = 2 if column.name in _IF_DIFFERENT else 1
        if column.name in _ALWAYS or len(values - {None, ""}) >= least:
            found.append(column)
    return found
