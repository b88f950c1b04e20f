"""A page of an explanation: what a model gains, where its time goes, and why."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_backends.bench.candidate_table import (
    HEADS,
    CandidateTable,
    Shown,
    calls_text,
    candidate_table,
    median_ms,
    number,
    short_number,
)
from dynamo_backends.bench.cells import as_ratio
from dynamo_backends.bench.dot_plots import ErrorPanel, Panel, Series, error_panel, panel, ratios_of
from dynamo_backends.bench.environment import environment
from dynamo_backends.bench.explained import Timed, Times, break_even, why_slower
from dynamo_backends.bench.rendering import environment_rows, render
from dynamo_backends.capture.explanation import Explanation, GraphExplanation, format_count
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.runtime.program import graph_name, part_names

_LISTED = 12  # operators and guards


@dataclass(frozen=True)
class _GraphView:
    """A captured graph on the page."""

    title: str
    source: str
    operators: str
    lines: tuple[str, ...]
    panel: Panel | None
    errors: ErrorPanel | None
    reports: list["_ReportView"]


@dataclass(frozen=True)
class _ReportView:
    """The report of a graph, as the page shows it."""

    sentence: str
    fallbacks: list[tuple[str, str]]
    remarks: list[str]
    contests: list[CandidateTable]


def explained_page(explanation: Explanation, times: Times | None, command: str) -> str:
    """Returns the page of an explanation.

    Args:
        explanation: What became of the model.
        times: What was measured of it, if anything was.
        command: What was typed.

    Raises:
        OptionError: jinja2 is not installed.
    """
    backend = explanation.backend
    views = [_graph(i, g, backend, times) for i, g in enumerate(explanation.graphs)]
    return render(
        "explained.html",
        title=f"dynamo-backends explain {explanation.function}",
        headline=headline(explanation, times),
        counts=_counts(explanation),
        columns=COLUMNS,
        rows=time_rows(explanation, times) if times is not None else [],
        call=_panel(backend, times.call) if times is not None else None,
        graphs=views,
        heads=HEADS,
        breaks=explanation.breaks,
        recompilations=explanation.recompilations,
        guards=list(explanation.guards.kinds.items()),
        notes=(
            *(why_slower(explanation, times) if times is not None else ()),
            *explanation.notes,
            *(times.notes if times is not None else ()),
        ),
        environment=environment_rows(environment()),
        command=command,
    )


def headline(explanation: Explanation, times: Times | None) -> str:
    """Returns the result in one sentence."""
    name, backend = explanation.function, explanation.backend
    if not explanation.graphs:
        return f"No graph of {name} was captured: all of it runs in eager."
    found = times.call.speedup if times is not None else None
    if times is None or found is None:
        return f"{backend} compiles {name} in {format_count(len(explanation.graphs), 'graph')}."
    eager, own = (median_ms(s) or 0.0 for s in (times.call.eager_s, times.call.compiled_s))
    calls = break_even(explanation.seconds, eager / 1e3, own / 1e3)
    pays = calls_text(calls)
    end = "compilation never pays off" if pays == "never" else f"compilation pays off after {pays}"
    value, low, high = map(as_ratio, (found.value, found.low, found.high))
    return (
        f"With {backend} a call of {name} is {value} times [{low}, {high}] as fast as in eager "
        f"({own:.3g} ms instead of {eager:.3g}); {end}."
    )


def _counts(e: Explanation) -> str:
    inside = sum(r.ops_in_eager for r in e.reports)
    parts = [
        format_count(len(e.graphs), "graph"),
        format_count(e.ops, "operation"),
        *([f"{inside} in eager within graphs"] if e.reports else []),
        format_count(sum(b.count for b in e.breaks), "graph break"),
        format_count(len(e.recompilations), "recompilation"),
        format_count(e.guards.count, "guard"),
    ]
    took = f"{format_count(e.calls, 'call')} took {e.seconds:.2f} s, compilation included"
    return f"{', '.join(parts)}. {took}."


def _graph(i: int, graph: GraphExplanation, backend: str, times: Times | None) -> _GraphView:
    timed = times.graphs[i] if times is not None and i < len(times.graphs) else None
    found = times.errors[i] if times is not None and i < len(times.errors) else None
    errors = [] if found is None else [("eager", found.eager, False), (backend, found.own, False)]
    again = ", recompiled" if graph.recompiled else ""
    counted = [f"{name} {n}" for name, n in list(graph.operators.items())[:_LISTED]]
    more = len(graph.operators) - _LISTED
    return _GraphView(
        f"Graph {i + 1} of {graph.function}{again}",
        "" if graph.source is None else str(graph.source),
        ", ".join([*counted, *([f"and {more} more"] if more > 0 else [])]),
        graph.lines,
        None if timed is None else _panel(backend, timed),
        error_panel(errors),
        [_report(report) for report in graph.reports],
    )


def _panel(backend: str, timed: Timed) -> Panel | None:
    found = timed.speedup
    if found is None:
        return None
    ratios = ratios_of(timed.eager_s, timed.compiled_s)
    return panel("", [Series(backend, ratios, (found.value, found.low, found.high))])


def _report(report: GraphReport) -> _ReportView:
    where = [f"{report.ops_on_backend} on {report.backend}"]
    if report.ops_on_inductor:
        where.append(f"{report.ops_on_inductor} on inductor")
    where.append(f"{report.ops_in_eager} in eager")
    fallbacks = [
        (f"{f.op}, {format_count(f.count, 'call')}: {f.reason}", f.source or "")
        for f in report.fallbacks
    ]
    return _ReportView(
        f"{report.kind.capitalize()} graph: operators {', '.join(where)}; "
        f"{format_count(report.blocks, 'block')}, "
        f"{format_count(report.executables, 'executable')}, "
        f"{report.compile_seconds:.2f} s.",
        fallbacks,
        list(_remarks(report)),
        _contests(report),
    )


def _remarks(report: GraphReport) -> Iterator[str]:
    if report.reverted:
        yield f"reverted: {report.reverted}"
    if report.exact:
        yield f"sizes are not padded: {report.exact}"
    for head, texts in (
        ("fell back at run time", report.runtime_fallbacks),
        ("not compared with eager", report.unverified),
        ("done without", report.failures),
        ("runs without a CUDA graph", report.uncaptured),
    ):
        yield from (f"{head}: {text}" for text in texts)
    whys: dict[str, list[str]] = {}
    for each in report.inputs:
        if each.reason:
            whys.setdefault(each.reason, []).append(each.name)
    for why, names in whys.items():
        yield f"not frozen: {_first(names)}: {why}"
    for each in report.inputs:
        if each.mutated:
            yield f"updated in place: {each.name}"
    if report.tuning:
        yield f"background tuning: {report.tuning}"


def _first(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _contests(report: GraphReport) -> list[CandidateTable]:
    groups: dict[str, list[CandidateReport]] = {}
    for row in report.candidates:
        groups.setdefault(row.graph, []).append(row)
    named = {key: f"{key or report.kind} graph" for key in groups}
    return [
        candidate_table(rows, report.chosen, report.tuning_seconds if i == 0 else {}, named[key])
        for i, (key, rows) in enumerate(groups.items())
    ]


COLUMNS = (
    ("what", "A call, its graphs, and the blocks that a graph was split into", True),
    ("ops", "Number of calls", False),
    ("eager ms", "Median in eager", False),
    ("ms", "Median compiled time; for blocks the mean under torch's profiler", False),
    ("× eager", "Median time of eager divided by the compiled time, from the same rounds", False),
    ("from", "Lower end of the 95% confidence interval", False),
    ("to", "Upper end", False),
    (
        "compile s",
        "Compile time of the backend; for the whole call all calls including Dynamo",
        False,
    ),
    ("pays off after", "Number of calls after which compilation has paid for itself", False),
)

Row = list[Shown]


def time_rows(explanation: Explanation, times: Times) -> list[Row]:
    """Returns the rows of the table, with the columns of `COLUMNS`."""
    rows = [_row("a call", explanation.ops, times.call, explanation.seconds)]
    for i, graph in enumerate(explanation.graphs):
        timed = times.graphs[i] if i < len(times.graphs) else None
        rows.append(_row(f"graph {i + 1}", graph.ops, timed or Timed(), graph.seconds))
        rows += _parts(graph, times)
    return [*rows, _row("outside of graphs", None, times.outside, None)]


def _parts(graph: GraphExplanation, times: Times) -> Iterator[Row]:
    """The parts of a graph that profilers saw; it as a whole where it has a name alone."""
    for report in graph.reports:
        whole = graph_name(report)
        if whole in times.parts:
            ops = report.ops_on_backend + report.ops_in_eager
            yield _seen(f"{report.kind} graph on {report.backend}", ops, times.parts[whole])
        for name, part in zip(_names(report), report.parts, strict=False):
            if name in times.parts:
                place = name.split()[-1]
                where = "part in eager" if part.runs_on == "eager" else f"block on {part.runs_on}"
                yield _seen(f"{report.kind} {where}, {place}", part.ops, times.parts[name])


def _names(report: GraphReport) -> list[str]:
    on_backend = [part.runs_on != "eager" for part in report.parts]
    return part_names(graph_name(report), on_backend)


def _seen(name: str, ops: int, seconds: float) -> Row:
    unknown = number(None)
    return [
        (name, name, "words indented"),
        number(ops, str),
        unknown,
        number(seconds * 1e3, short_number),
        *[unknown] * 5,
    ]


def _row(name: str, ops: int | None, timed: Timed, compile_s: float | None) -> Row:
    eager, own = (statistics.median(s) if s else None for s in (timed.eager_s, timed.compiled_s))
    found = timed.speedup
    ratios = (None, None, None) if found is None else (found.value, found.low, found.high)
    calls = None if eager is None or own is None else break_even(compile_s, eager, own)
    return [
        (name, name, "words"),
        number(ops, str),
        number(None if eager is None else eager * 1e3, short_number),
        number(None if own is None else own * 1e3, short_number),
        *(number(ratio, as_ratio) for ratio in ratios),
        number(compile_s, "{:.2f}".format),
        (calls_text(calls), "" if calls is None else calls, ""),
    ]
