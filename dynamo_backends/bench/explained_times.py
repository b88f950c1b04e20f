"""Where the time of an explained model goes: its calls, their graphs, and the parts of these."""

import statistics
from collections.abc import Iterator

from dynamo_backends.bench.cells import as_ratio
from dynamo_backends.bench.contest import Shown, calls_text, number, short_number
from dynamo_backends.bench.explained import Timed, Times, break_even
from dynamo_backends.capture.explanation import Explanation, GraphExplanation
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.profiled import graph_name, part_names

COLUMNS = (
    ("what", "A call, its graphs, and the parts that a graph was split into", True),
    ("ops", "Calls in it", False),
    ("eager ms", "Median in eager", False),
    ("ms", "Median compiled; of parts the mean under torch's profiler", False),
    ("× eager", "Median time of eager over its own, from the same rounds", False),
    ("from", "Lower end of the 95% confidence interval", False),
    ("to", "Upper end", False),
    ("compile s", "What the backend took; of the whole: all calls, Dynamo included", False),
    ("pays off after", "Calls after which compiling has paid for itself", False),
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
