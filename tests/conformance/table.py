"""The page of the operator database, docs/conformance.md: a row and a section of each sweep."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dynamo_backends.conformance.outcomes import Outcome
from dynamo_backends.interface.registry import get_backend

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
COLUMNS = (
    "| sweep | dtype | operators | samples | native | fallback | wrong | crash | native share |"
)
SECTIONS = "\n## Operators that are not native\n"


class Sweep(NamedTuple):
    """What was run, in words.

    Attributes:
        name: Of the row and the section: the backend's, or what of it was swept.
        backend: Which one ran the operators.
        vendor: What runs it, where that is not the first of the packages behind it.
        limit: How many samples of each were run at most.
        operators: Which were run.
    """

    name: str
    backend: str
    vendor: str = ""
    limit: int | None = None
    operators: str = "Every operator"


def native_share(outcomes: Sequence[Outcome], dtype: str) -> float:
    """The share of a dtype's operators that ran without any fallback."""
    ran = [o for o in outcomes if o.dtype == dtype and o.samples]
    return sum(o.status == "native" for o in ran) / len(ran)


def _vendor(backend: str) -> str:
    """The first of the packages behind a backend, with its version."""
    found = get_backend(backend).versions()
    (name, version), *_ = [*found.items(), ("torch", torch.__version__)]
    return _release(f"{name} {version}")


def _release(version: str) -> str:
    """A version without the name of its build, such as "+cpu"."""
    return version.partition("+")[0]


def rows(outcomes: Sequence[Outcome], name: str) -> list[str]:
    """The lines of the summary, one for each dtype."""
    by_dtype: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.samples:
            by_dtype[outcome.dtype].append(outcome)
    lines = []
    for dtype, ran in by_dtype.items():
        count = Counter(o.status for o in ran)
        crashed = sum(o.failed for o in ran) - count["wrong"]
        lines.append(
            f"| {name} | {dtype} | {len(ran)} | {sum(o.samples for o in ran)} | {count['native']} "
            f"| {count['fallback']} | {count['wrong']} | {crashed} "
            f"| {native_share(ran, dtype):.1%} |"
        )
    return lines


def section(outcomes: Sequence[Outcome], sweep: Sweep) -> str:
    """With what a sweep was made, and its operators that are not native, with their reasons."""
    versions = {_release(f"torch {torch.__version__}"), sweep.vendor or _vendor(sweep.backend)}
    samples = f"at most {sweep.limit} of its sample inputs" if sweep.limit else "its sample inputs"
    lines = [f"{sweep.operators} on {samples}, with {' and '.join(sorted(versions))}.", ""]
    lines += ["| operator | dtypes | why |", "|---|---|---|"]
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for o in outcomes:
        if o.samples and o.status != "native":
            reason = next((r for r, _ in o.reasons.most_common() if "its block" not in r), o.status)
            reason = " ".join(reason.replace("|", "\\|").split())  # one line, as tables have
            grouped[o.name, reason].append(o.dtype)
    for (op, reason), dtypes in sorted(grouped.items()):
        lines.append(f"| {op} | {', '.join(dtypes)} | {reason} |")
    return "\n".join(lines) + "\n"


def put(page: str, name: str, summary: Sequence[str], text: str) -> str:
    """The page with a sweep's rows and section, in the place of those that it had."""
    head, mark, tail = page.partition(SECTIONS)
    before, columns, table = head.partition(COLUMNS)
    if not (mark and columns):
        raise ValueError(f"the page has no line {COLUMNS!r}, or none {SECTIONS.strip()!r}")
    ruler, *old = table.strip().splitlines()
    is_its = [line.startswith(f"| {name} |") for line in old]
    at = is_its.index(True) if True in is_its else len(old)
    kept = [line for line, its in zip(old, is_its, strict=True) if not its]
    lines = [columns, ruler, *kept[:at], *summary, *kept[at:]]
    new = f"\n### {name}\n\n{text}"
    found = re.search(rf"\n### {re.escape(name)}\n.*?(?=\n### |\Z)", tail, re.DOTALL)
    tail = tail[: found.start()] + new + tail[found.end() :] if found else tail + new
    return before + "\n".join(lines) + "\n" + mark + tail


def write(outcomes: Sequence[Outcome], sweep: Sweep, path: Path = PAGE) -> None:
    """Rewrites what docs/conformance.md says of a sweep."""
    page = path.read_text(encoding="utf-8")
    page = put(page, sweep.name, rows(outcomes, sweep.name), section(outcomes, sweep))
    path.write_text(page, encoding="utf-8")
