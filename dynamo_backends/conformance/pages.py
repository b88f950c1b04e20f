"""The page of a run, in Markdown: what passes, what raises, what is wrong, what falls to eager."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from dynamo_backends.bench.cells import short
from dynamo_backends.conformance.outcomes import (
    FAILURES,
    GROUPS,
    MEANINGS,
    STATUSES,
    UNTRIED,
    Outcome,
    Status,
)
from dynamo_backends.conformance.subject import reports_itself

_SLOWEST = 10
_HEADS: Mapping[Status, str] = {"native": "right", "fallback": "partly eager"}
_SILENT = "It does not say which operators it leaves to eager."


def page(found: Mapping[str, Any]) -> str:
    """Returns the page of a run.

    Args:
        found: See `runs.result`.
    """
    outcomes = [Outcome.from_dict(given) for given in found["results"]]
    backend = found["context"]["backend"]
    failed = [o for o in outcomes if o.status in FAILURES]
    elsewhere = [o for o in outcomes if o.status in ("fallback", "random", "declared")]
    untried = [o for o in outcomes if o.status in UNTRIED]
    parts = [
        f"# Conformance of {short(backend)}",
        headline(outcomes),
        _made_with(found),
        *([] if reports_itself(backend) else [_SILENT]),
        "## Summary",
        summary(outcomes),
        _legend(outcomes),
        *filter(None, [native_share(backend, outcomes)]),
        *_section("## What is wrong", failed),
        *_examples(failed),
        *_section("## What is right, but not whole or not eager's own", elsewhere),
        *_section("## What could not be tried", untried),
        "## What took longest",
        table(("check", "seconds"), _slowest(outcomes)),
    ]
    return "\n\n".join(parts) + "\n"


def headline(outcomes: Sequence[Outcome]) -> str:
    """Returns a run in a sentence."""
    tried = [o for o in outcomes if o.status not in UNTRIED]
    count = Counter(o.status for o in tried if o.failed)
    if not count:
        return f"None of {len(tried)} checks fails."
    kinds = ", ".join(f"{count[s]} {s}" for s in STATUSES if count[s])
    return f"{count.total()} of {len(tried)} checks fail: {kinds}."


def native_share(backend: str, outcomes: Sequence[Outcome]) -> str:
    """Returns which part of the random graphs ran wholly on a backend; empty if there are none.

    Args:
        backend: Only this package's say what they leave to eager.
        outcomes: Outcomes of a run.
    """
    graphs = [o for o in outcomes if o.group == "rewrites" and o.status not in UNTRIED]
    if not graphs or not reports_itself(backend):
        return ""
    native = sum(o.status == "native" for o in graphs)
    return (
        f"{native} of {len(graphs)} random graphs ({native / len(graphs):.1%}) ran wholly on "
        f"{short(backend)}."
    )


def _examples(outcomes: Sequence[Outcome]) -> list[str]:
    return [f"`{o.check}`:\n\n```python\n{o.example}```" for o in outcomes if o.example]


def _made_with(found: Mapping[str, Any]) -> str:
    context = found["context"]
    versions = ", ".join(
        f"{name} {version.partition('+')[0]}" for name, version in context["packages"].items()
    )
    commands = ", ".join(f"`{command}`" for command in found["commands"])
    most = context["samples"]
    samples = "all samples" if most is None else f"at most {most} samples"
    if most == 1:
        samples = "one sample"
    text = (
        f"{commands} on {found['date']}: {context['processor']}, "
        f"Python {context['python']}, {versions}; {samples} of each operator, "
        f"torch's threads: {context['torch_threads']}."
    )
    missing = found["not_run"]
    return f"{text}\n\n{len(missing)} checks were not run yet." if missing else text


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns a table of how many checks ended how, by group."""
    used = [s for s in STATUSES if any(o.status == s for o in outcomes) or s in FAILURES]
    rows = []
    for group in GROUPS:
        count = Counter(o.status for o in outcomes if o.group == group)
        if count:
            rows.append((group, count.total(), *(count[status] for status in used)))
    return table(("group", "checks", *(_HEADS.get(s, s) for s in used)), rows)


def _legend(outcomes: Sequence[Outcome]) -> str:
    used = {o.status for o in outcomes} | FAILURES
    return "\n".join(f"- {_HEADS.get(s, s)}: {MEANINGS[s]}" for s in STATUSES if s in used)


def _section(title: str, outcomes: Sequence[Outcome]) -> list[str]:
    if not outcomes:
        return []
    rows = [(f"`{o.check}`", _HEADS.get(o.status, o.status), _reasons(o)) for o in outcomes]
    return [title, table(("check", "", "what"), rows)]


def _reasons(outcome: Outcome) -> str:
    told = [*outcome.declared, *(reason for reason, _ in outcome.reasons.most_common(2))]
    return _without_links("; ".join(dict.fromkeys(told)))


def _without_links(reason: str) -> str:
    # A printed call, such as "op[target=x](a)", would be a link.
    return reason.replace("](", "]\\(")


_PARTICULARS = (
    (re.compile(r"^[\w-]+\.[\w.]+: "), ""),  # the call that the reason is about
    (re.compile(r"aten::[\w.]+"), "aten::…"),
    (re.compile(r"\d+\.\d+e[+-]\d+|\bnan\b"), "…"),
    (re.compile(r"\(\d+(, \d+)*\)"), "(…)"),
    (re.compile(r"\bs\d+$"), "s…"),
)


def reasons_table(what: str, outcomes: Iterable[tuple[str, Outcome]], most: int = 10) -> str:
    """Returns a table of the most common main reasons, without the calls and sizes in them.

    Args:
        what: What is counted, in the plural.
        outcomes: Each with the name of its backend.
        most: Number of reasons.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for backend, outcome in outcomes:
        reason = main_reason(outcome)
        for pattern, text in _PARTICULARS:
            reason = pattern.sub(text, reason)
        found[reason][backend] += 1
    rows = []
    for reason, count in sorted(found.items(), key=lambda item: -item[1].total())[:most]:
        parts = [f"{name} {n}" for name, n in count.most_common(4)]
        more = [f"{len(count) - 4} more"] if len(count) > 4 else []
        rows.append((reason, count.total(), ", ".join([*parts, *more])))
    return table(("reason", what, "where"), rows) + "\n"


def main_reason(outcome: Outcome) -> str:
    """Returns the one reason to give for an outcome on a page; its status if it has none."""
    # That a block is too small follows from another call that was left to eager.
    reasons = (r for r, _ in outcome.reasons.most_common() if "its block" not in r)
    return _without_links(next(chain(outcome.declared, reasons, [outcome.status])))


def _slowest(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    ordered = sorted(outcomes, key=lambda o: -o.seconds)[:_SLOWEST]
    return [(f"`{o.check}`", f"{o.seconds:.1f}") for o in ordered]


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").replace("<", "&lt;").split())
