"""One HTML page for a run or a comparison: a single file that asks no network for anything."""

from typing import Any

from dynamo_backends.bench.cells import Outcome, Run, short
from dynamo_backends.bench.comparison import Comparison
from dynamo_backends.bench.dot_plots import panels
from dynamo_backends.bench.environment import threads_in_words
from dynamo_backends.bench.rendering import environment_rows, render
from dynamo_backends.bench.summary import Summary, choices, headline, summaries
from dynamo_backends.bench.tables import Column, columns, summary_cells

_WORDS = ("model", "backend", "mode", "dtype", "status", "chosen")  # columns that are not numbers
_SUMMARY = (
    ("pass", "Models with correct results"),
    ("pass rate", "Of the models that eager can run"),
    ("× eager", "Geometric mean of the models that pass"),
    ("lowest", "Slowest model that passes"),
    ("faster", "Models that are significantly faster than eager"),
    ("slower", "Models that are significantly slower than eager"),
    ("cold s", "Median time of compilation and first call with empty caches"),
    ("warm s", "Median time of compilation and first call in a second process"),
    ("memory", "Eager's peak memory divided by the backend's: geometric mean"),
)

Shown = tuple[str, Any, str]
"""Text of a table's cell, what it is sorted by, and its class."""


def run_page(run: Run) -> str:
    """Returns the page of a run.

    Raises:
        OptionError: jinja2 is not installed.
    """
    found = summaries(run)
    several = len({s.key[1:] for s in found}) > 1
    listed = columns(run)
    outcomes = sorted(run.outcomes.items())
    return render(
        "run.html",
        title=f"dynamo-backends bench {short(run.context['suite'])}",
        headline=headline(run),
        machine=_machine(run),
        date=run.context.get("date", ""),
        summary_heads=_summary_heads(several),
        summary_rows=[_summary_row(s, several) for s in found],
        choices=choices(run),
        columns=listed,
        words=_WORDS,
        rows=[[_shown(column, c, o) for column in listed] for c, o in outcomes],
        failures=[(c, o) for c, o in outcomes if not o.passed],
        notes=[(c, o) for c, o in outcomes if o.note],
        kind_of=_kind,
        panels=panels(run),
        environment=environment_rows(run.context),
        command=run.command,
    )


def comparison_page(found: Comparison) -> str:
    """Returns the page of a comparison.

    Raises:
        OptionError: jinja2 is not installed.
    """
    return render(
        "comparison.html",
        title="dynamo-backends bench compare",
        headline=found.headline,
        contexts=found.contexts,
        changes=found.changes,
        missing=found.missing,
        new=found.new,
        short=short,
        kinds={"regression": "bad", "improvement": "good", "same": ""},
    )


def _shown(column: Column, cell: Any, outcome: Outcome) -> Shown:
    value = column.value(cell, outcome)
    kinds = ["words"] if column.name in _WORDS else []
    if column.name == "status":
        kinds.append(_kind(outcome))
    return column.show(cell, outcome), "" if value is None else value, " ".join(kinds)


def _kind(outcome: Outcome) -> str:
    if outcome.passed:
        return "good"
    return "odd" if outcome.eager_failed else "bad"


def _summary_heads(several: bool) -> list[tuple[str, str, bool]]:
    first = [("backend", "What compiles", True)]
    kind = [("mode", "Mode, dtype, batch size", True)] if several else []
    return [*first, *kind, *((name, about, False) for name, about in _SUMMARY)]


def _summary_row(s: Summary, several: bool) -> list[tuple[str, Any, bool]]:
    keys = (s.passed, s.pass_rate, s.speedup, s.lowest and s.lowest[1], s.faster, s.slower,
            s.cold_s, s.warm_s, s.memory)  # fmt: skip
    names = [short(s.key[0]), *([s.kind] if several else [])]
    return [
        *((name, name, True) for name in names),
        *(
            (text, "" if key is None else key, False)
            for text, key in zip(summary_cells(s), keys, strict=True)
        ),
    ]


def _machine(run: Run) -> str:
    facts = run.context
    return (
        f"{facts.get('processor')}, {threads_in_words(facts.get('torch_threads'))}, "
        f"torch {facts.get('versions', {}).get('torch')}"
    )
