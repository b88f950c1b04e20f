"""Defines the result of `explain`, as data."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from dynamo_backends.capture.graph_breaks import GraphBreak, SourceLine
from dynamo_backends.capture.guards import Guards, Recompilation
from dynamo_backends.capture.rendering import (
    RichRenderable,
    candidates_table,
    format_measurements,
    format_tuning_seconds,
    traffic_table,
)
from dynamo_backends.interface.counters import format_stage_seconds
from dynamo_backends.interface.report import Fallback, GraphReport, InputReport, to_json_types


@dataclass(frozen=True)
class GraphExplanation:
    """What became of one captured graph: operators, compile time and reports.

    Attributes:
        function: The function that it comes from.
        source: That function's first line; None if it is the call of a module of torch's own.
        operators: How often it calls what, as Dynamo captured it, the most frequent first.
        seconds: What the backend took to compile it, without Dynamo.
        recompiled: The code had been compiled before.
        reports: What the pipeline made of it: an inference graph, or a forward and (if gradients
            were computed) a backward graph. Empty for a backend of somebody else.
        lines: The user's lines that its calls come from, "file:line, code", those with most calls
            first.
    """

    function: str
    source: SourceLine | None
    operators: Mapping[str, int]
    seconds: float
    recompiled: bool = False
    reports: tuple[GraphReport, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def ops(self) -> int:
        """Returns the number of calls in the graph, as Dynamo captured it."""
        return sum(self.operators.values())


@dataclass(frozen=True)
class Explanation(RichRenderable):
    """The report of a function or module under a compiler; `print` it, or use it as data.

    Attributes:
        function: Its name.
        backend: Name of the backend.
        calls: How often it was called.
        seconds: How long these calls took, compilation included.
        graphs: What Dynamo captured, in the order in which it did.
        breaks: Where capture stopped, and why.
        guards: Under which conditions the graphs are used again.
        recompilations: What made Dynamo compile code again.
        notes: What else one should know, in sentences.
    """

    function: str
    backend: str
    calls: int
    seconds: float
    graphs: tuple[GraphExplanation, ...]
    breaks: tuple[GraphBreak, ...]
    guards: Guards
    recompilations: tuple[Recompilation, ...]
    notes: tuple[str, ...] = ()

    @property
    def ops(self) -> int:
        """Returns the number of calls in all captured graphs."""
        return sum(graph.ops for graph in self.graphs)

    @property
    def reports(self) -> tuple[GraphReport, ...]:
        """Returns the pipeline's reports of all graphs, forward and backward."""
        return tuple(report for graph in self.graphs for report in graph.reports)

    @property
    def chosen(self) -> list[tuple[str, int]]:
        """Counts the graphs that each autotune candidate runs, most frequent first."""
        return Counter(r.chosen for r in self.reports if r.chosen).most_common()

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole explanation in types that JSON has."""
        return {f.name: to_json_types(getattr(self, f.name)) for f in fields(self)}

    def save(self, path: str | Path) -> None:
        """Writes the explanation to a JSON file.

        Args:
            path: Path of the file; it is replaced if it exists.
        """
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        Path(os.path.expanduser(path)).write_text(text, encoding="utf-8")

    def __rich__(self) -> "RenderableType":
        """Returns the report, for rich's `print`."""
        return render_explanation(self)


_LISTED_INPUTS = 12
_LISTED_OPERATORS = 8
_LISTED_PARTS = 20
_LISTED_GUARDS = 8
_TELLING = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH", "SHAPE_ENV"})  # about values and sizes


def render_explanation(explanation: "Explanation") -> RenderableType:
    """Renders an explanation for a rich console."""
    parts: list[RenderableType] = [_head(explanation)]
    for i, graph in enumerate(explanation.graphs, 1):
        parts += ["", *_graph(i, graph)]
    if explanation.breaks:
        parts += ["", _title("Graph breaks"), *_breaks(explanation)]
    if explanation.recompilations:
        parts += ["", _title("Recompilations"), *_recompilations(explanation)]
    if explanation.guards.count:
        parts += ["", _title("Guards"), *_guards(explanation)]
    if explanation.notes:
        parts += ["", *(Text(note) for note in explanation.notes)]
    return Group(*parts)


def _head(e: "Explanation") -> RenderableType:
    counts = ", ".join(
        (
            format_count(len(e.graphs), "graph"),
            format_count(e.ops, "operation"),
            format_count(sum(b.count for b in e.breaks), "graph break"),
            format_count(len(e.recompilations), "recompilation"),
            format_count(e.guards.count, "guard"),
        )
    )
    line = Text.assemble((e.function, "bold"), f" with {e.backend}: {counts}")
    if e.chosen:
        line.append("; chosen: " + ", ".join(f"{name} {n}" for name, n in e.chosen))
    times = f"{format_count(e.calls, 'call')} took {e.seconds:.2f} s, compilation included"
    return Group(line, Text(times, style="dim"))


def _graph(number: int, graph: "GraphExplanation") -> Iterable[RenderableType]:
    again = ", recompiled" if graph.recompiled else ""
    yield _title(f"Graph {number} of {graph.function}{again}")
    if graph.source is not None:
        yield _line(str(graph.source), style="dim")
    yield _line(f"{format_count(graph.ops, 'operation')}: {_counted(graph.operators)}")
    if not graph.reports:
        yield _line(f"compiled in {graph.seconds:.2f} s")
    for report in graph.reports:
        yield from _report(report)


def _report(report: GraphReport) -> Iterable[RenderableType]:
    where = [f"{report.ops_on_backend} on {report.backend}"]
    if report.ops_on_inductor:
        where.append(f"{report.ops_on_inductor} on inductor")
    where.append(f"{report.ops_in_eager} in eager")
    blocks = format_count(report.blocks, "block")
    yield _line(f"{report.kind} graph: operators {', '.join(where)}; {blocks}", "bold")
    if report.reverted:
        yield _line(f"reverted: {report.reverted}", "yellow")
    if report.exact:
        yield _line(f"sizes are not padded: {report.exact}", "yellow")
    if report.blocks > 1 or report.fallbacks:
        yield _line(_parts(report), indent=4)
    yield from _fallbacks(report.fallbacks)
    for reason in report.runtime_fallbacks:
        yield _line(f"fell back at run time: {reason}", "red", 4)
    for pace in report.paces:
        yield _line(
            f"speed compared with eager: {pace}", "red" if pace.outcome == "slower" else "dim", 4
        )
    for reason in report.unverified:
        yield _line(f"not compared with eager: {reason}", "yellow", 4)
    for reason in report.failures:
        yield _line(f"non-fatal failure: {reason}", "yellow", 4)
    for reason in report.uncaptured:
        yield _line(f"runs without a CUDA graph: {reason}", "yellow", 4)
    if report.tolerance:
        yield _line(_int8(report), indent=4)
    if report.tuned:
        yield _line(
            f"{format_count(report.tuned, 'fused function')} with a tuned schedule", indent=4
        )
    yield from _inputs(report)
    for text in report.output_aliases:
        yield _line(text, indent=4)
    yield from _compilations(report)
    if report.mesh is not None:
        yield from (_line(line, indent=4) for line in str(report.mesh).splitlines())
    if report.tuning:
        yield _line(f"background tuning: {report.tuning}", indent=4)
    if report.candidates:
        yield _line(format_tuning_seconds(report.candidates, report.tuning_seconds), indent=4)
        yield Padding(candidates_table(report), (0, 0, 0, 4))


def _int8(report: GraphReport) -> str:
    """Returns what is admitted of results in int8, and what was measured."""
    text = f"{report.precision or 'int8'}: tolerance {report.tolerance}"
    if not report.measured:
        return text
    text = f"{text}; {format_measurements(report.measured)} on held-out batches"
    if report.in_float:
        text += f"; the first {report.in_float:.0%} of the quantizable layers stay in float32"
    return text


def _parts(report: GraphReport) -> str:
    shown = [f"{part.runs_on} {part.ops}" for part in report.parts[:_LISTED_PARTS]]
    more = ["..."] if len(report.parts) > _LISTED_PARTS else []
    return "parts, with their operators: " + " | ".join(shown + more)


def _fallbacks(fallbacks: Iterable[Fallback]) -> Iterable[RenderableType]:
    for each in fallbacks:
        style = "dim" if each.by_design else "yellow"
        yield _line(
            f"in eager: {each.op} ({format_count(each.count, 'call')}): {each.reason}", style, 4
        )
        if each.source is not None:
            yield _line(f"at {each.source}", "dim", 6)


def _inputs(report: GraphReport) -> Iterable[RenderableType]:
    roles: dict[str, int] = {}
    for each in report.inputs:
        label = f"{each.role} (frozen)" if each.frozen else each.role
        roles[label] = roles.get(label, 0) + 1
    if roles:
        yield _line("inputs: " + ", ".join(f"{n} {role}" for role, n in roles.items()), indent=4)
    whys: dict[str, list[InputReport]] = {}
    for each in report.inputs:
        if each.reason:
            whys.setdefault(each.reason, []).append(each)
    for why, inputs in whys.items():
        yield _line(f"not frozen: {_names(x.name for x in inputs)}: {why}", indent=4)
    for each in report.inputs:
        if each.mutated:
            yield _line(f"updated in place: {each.name}{_shared(each)}", indent=4)
            for place in each.mutated_at:
                yield _line(f"at {place}", "dim", 6)
        elif each.shares_memory_with and report.kind != "backward":
            yield _line(f"shares memory: {each.name}{_shared(each)}", indent=4)


def _shared(each: InputReport) -> str:
    shared = each.shares_memory_with
    return f", which shares memory with {', '.join(shared)}" if shared else ""


def _compilations(report: GraphReport) -> Iterable[RenderableType]:
    made = format_count(report.executables, "executable")
    hits = f", {report.cache_hits} from the disk cache" if report.cache_hits else ""
    bound = f"; weights were prepared again {report.rebinds} times" if report.rebinds else ""
    yield _line(f"{made}{hits}, {report.compile_seconds:.2f} s{bound}", indent=4)
    if stages := format_stage_seconds(report.stage_seconds):
        yield _line(f"seconds of each stage: {stages}", indent=6)
    if report.symbols:
        ranges = ", ".join(f"{name} {text}" for name, text in report.symbols.items())
        yield _line(f"symbols: {ranges}", indent=4)
    if report.served:
        yield Padding(traffic_table(report.served), (0, 0, 0, 4))
        return
    for each in report.compilations:
        if each.shapes:
            yield _line(f"for {_names(each.shapes)}", "dim", 6)


def _breaks(explanation: "Explanation") -> Iterable[RenderableType]:
    for each in explanation.breaks:
        often = f" ({each.count} times)" if each.count > 1 else ""
        yield Text.assemble("- ", (each.reason, "yellow"), f" in {each.function}{often}")
        if each.source is not None:
            yield _line(f"at {each.source}")
        if each.skipped:
            yield _line(
                "all of this function runs in eager; functions that it calls may still be compiled"
            )
        for text in filter(None, (each.explanation, *(f"hint: {h}" for h in each.hints[:2]))):
            yield _line(text, "dim")


def _recompilations(explanation: "Explanation") -> Iterable[RenderableType]:
    for each in explanation.recompilations:
        yield Text.assemble("- ", (each.kind, "yellow"), f" in {each.function}: {each.reason}")
        if each.source is not None:
            yield _line(f"at {each.source}")


def _guards(explanation: "Explanation") -> Iterable[RenderableType]:
    yield _line(_counted(explanation.guards.kinds, limit=100))
    listed = [c for g in explanation.guards.guards if g.kind in _TELLING for c in g.checks]
    checks = [c for c in dict.fromkeys(listed) if not c.startswith("__")]  # of the user's code
    for check in checks[:_LISTED_GUARDS]:
        yield _line(check, "dim", 4)
    if len(checks) > _LISTED_GUARDS:
        yield _line("...", "dim", 4)


def _title(text: str) -> Text:
    return Text(text, style="bold underline")


def _line(text: str, style: str = "", indent: int = 2) -> RenderableType:
    return Padding(Text(text, style=style), (0, 0, 0, indent))


def format_count(n: int, what: str) -> str:
    """Formats a number with its noun, such as "2 graphs" or "1 graph"."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def _counted(counts: Mapping[str, int], limit: int = _LISTED_OPERATORS) -> str:
    shown = [f"{name} {n}" for name, n in list(counts.items())[:limit]]
    more = [f"and {len(counts) - limit} more"] if len(counts) > limit else []
    return ", ".join(shown + more)


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _LISTED_INPUTS
    return ", ".join(listed[:_LISTED_INPUTS]) + (f" and {more} more" if more > 0 else "")
