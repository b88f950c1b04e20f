"""A page of autotune's decisions: who runs which graph, and what it is worth."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_backends.autotune.decisions import Decision
from dynamo_backends.autotune.options import EAGER
from dynamo_backends.bench.candidate_table import (
    HEADS,
    CandidateTable,
    Shown,
    calls_text,
    candidate_table,
    number,
    pays_off,
)
from dynamo_backends.bench.cells import as_ratio
from dynamo_backends.bench.rendering import environment_rows, render
from dynamo_backends.interface.report import CandidateReport

_DETAILED = 60  # decisions: of the others there are lines in the table
_KEY = 12  # characters of a key that `cache ls` shows

_COLUMNS = (
    ("key", "Key, as `dynamo-backends cache ls` shows it", True),
    ("decided", "When", True),
    ("graph", "Kind of graph", True),
    ("calls", "Number of operators in the graph", False),
    ("chosen", "Backend that runs the graph", True),
    ("× eager", "Median time of eager divided by that of the chosen backend", False),
    ("compile s", "Compilation and first call of the chosen backend", False),
    ("pays off after", "Number of calls after which compilation has paid for itself", False),
    ("inputs", "Dtypes and shapes of the inputs that are not weights", True),
)


@dataclass(frozen=True)
class _Section:
    """One decision on the page."""

    key: str
    title: str
    sentence: str
    contest: CandidateTable
    facts: list[tuple[str, str]]
    environment: list[tuple[str, str]]
    lines: tuple[str, ...]


def decisions_page(decisions: Sequence[Decision], command: str) -> str:
    """Returns the page of some decisions, the newest first.

    Args:
        decisions: In this order.
        command: What was typed.

    Raises:
        OptionError: jinja2 is not installed.
    """
    detailed = decisions[:_DETAILED]
    return render(
        "decisions.html",
        title="autotune's decision" + ("s" if len(decisions) != 1 else ""),
        headline=headline(decisions),
        several=len(decisions) > 1,
        columns=_COLUMNS,
        rows=[(d.key[:_KEY] if d in detailed else "", _row(d)) for d in decisions],
        heads=HEADS,
        sections=[_section(d) for d in detailed],
        left_out=len(decisions) - len(detailed),
        command=command,
    )


def headline(decisions: Sequence[Decision]) -> str:
    """Returns the result in one sentence."""
    if not decisions:
        return "There are no decisions yet."
    if len(decisions) == 1:
        return _sentence(decisions[0])
    counts = Counter(d.winner for d in decisions).most_common()
    chosen = ", ".join(f"{name} runs {count}" for name, count in counts)
    return f"{len(decisions)} graphs were tuned: {chosen}."


def _sentence(decision: Decision) -> str:
    row, others = _winner(decision), len(decision.candidates) - 1
    graph = f"the {decision.graph} graph of {decision.ops} calls"
    rivals = f"{others} other candidate{'' if others == 1 else 's'}"
    if decision.winner == EAGER:
        return f"Eager runs {graph}: none of {rivals} is correct and faster."
    if decision.objective == "memory":
        return (
            f"{decision.winner} runs {graph}: it uses the least memory of all candidates, compared "
            f"with {rivals}."
        )
    if row.speedup is None:
        return f"{decision.winner} runs {graph}, chosen over {rivals}."
    value, low, high = map(as_ratio, row.speedup)
    return (
        f"{decision.winner} runs {graph}: {value} times [{low}, {high}] as fast as eager, "
        f"chosen over {rivals}."
    )


def _winner(decision: Decision) -> CandidateReport:
    return next(row for row in decision.candidates if row.name == decision.winner)


def _row(decision: Decision) -> list[Shown]:
    row = _winner(decision)
    eager = next((r for r in decision.candidates if r.name == EAGER), None)
    inputs = ", ".join(decision.inputs) or "none"
    calls = pays_off(row, eager)
    return [
        (decision.key[:_KEY], decision.key, "words"),
        (_when(decision), decision.created, "words"),
        (decision.graph, decision.graph, "words"),
        number(decision.ops, str),
        (decision.winner, decision.winner, "words"),
        number(row.speedup and row.speedup[0], as_ratio),
        number(row.compile_s),
        (calls_text(calls), "" if calls is None else calls, ""),
        (inputs, inputs, "words long"),
    ]


def _when(decision: Decision) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(decision.created))


def _section(decision: Decision) -> _Section:
    facts: dict[str, Any] = {
        "decided": _when(decision),
        "inputs": decision.inputs or "none",
        "objective": decision.objective,
        "precision": decision.precision,
        "writes to inputs": decision.mutated,
        "short of time": (
            f"the budget of {decision.short_of_s:g} s was too short to try all candidates"
        )
        if decision.short_of_s
        else "",
        "busy machine": "other processes used the CPUs while candidates were measured"
        if decision.disturbed
        else "",
        "key": decision.key,
    }
    return _Section(
        decision.key[:_KEY],
        f"{decision.graph} graph of {decision.ops} calls, {decision.key[:_KEY]}",
        _sentence(decision),
        candidate_table(decision.candidates, decision.winner, decision.seconds),
        environment_rows({k: v for k, v in facts.items() if v not in ((), "")}),
        environment_rows(decision.environment),
        decision.lines,
    )
