"""Tables and charts of runs in Markdown: times, and whether models pass."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_backends.bench.cells import EAGER, Cell, Outcome, Run, Status, as_ratio, short
from dynamo_backends.bench.dot_plots import Series, panel
from dynamo_backends.bench.environment import threads_in_words
from dynamo_backends.bench.rendering import render, table
from dynamo_backends.bench.statistics import geometric_mean
from dynamo_backends.bench.summary import choices, chosen_text, describe_mode, headline, summaries
from dynamo_backends.bench.tables import summary_cells

_FAILURES: tuple[Status, ...] = (
    "fail_accuracy",
    "fail_to_run",
    "not_compiled",
    "timeout",
    "OOM",
)
_LONGEST = 200  # characters of a reason

_Kind = tuple[str, str, str, int | None]


@dataclass(frozen=True)
class Rate:
    """The outcomes of one backend for the models of a run, in one mode, dtype and batch size.

    Attributes:
        name: The backend, and the mode if the run has several.
        outcomes: Outcomes of the models that eager can run.
        eager_failed: How many it cannot run, or not twice alike.
        left: Models that were not run.
    """

    name: str
    outcomes: Sequence[Outcome]
    eager_failed: int
    left: Sequence[str]

    @property
    def passed(self) -> int:
        """Returns how many pass."""
        return sum(outcome.passed for outcome in self.outcomes)


def rates(run: Run) -> list[Rate]:
    """Returns the rates of each backend, in the order of the run."""
    groups: dict[_Kind, list[Cell]] = {}
    for cell in run.cells:
        groups.setdefault((cell.backend, cell.mode, cell.dtype, cell.batch), []).append(cell)
    several = len({key[1:] for key in groups}) > 1
    return [_rate(run, key, cells, several) for key, cells in groups.items()]


def rates_text(run: Run) -> str:
    """Returns how many models pass, which fail and why, and which were not run."""
    return "\n".join([rates_table(run), failures_table(run), left_list(run)])


def rates_table(run: Run) -> str:
    """Returns a line per backend: how many models pass, fail in which way, and were not run."""
    head = ["backend", "pass", "pass rate", *_FAILURES, "eager fails", "not run",
            "operators in eager", "graph breaks"]  # fmt: skip
    return table(head, [_line(found) for found in rates(run)], words=1)


def failures_table(run: Run) -> str:
    """Returns a line per model that a backend, or eager, fails; a sentence if there is none."""
    rows = [
        [cell.model, f"`{short(cell.backend)}`", outcome.status, _as_cell(outcome.reason)]
        for cell, outcome in run.outcomes.items()
        if not outcome.passed
    ]
    if not rows:
        return "No measured model fails.\n"
    return table(["model", "backend", "status", "reason"], rows, words=4)


def left_list(run: Run) -> str:
    """Lists the models that were not run, by backend, in Markdown."""
    lines = [f"- {found.name}: {_left(found)}\n" for found in rates(run) if found.left]
    return "".join(["Not run:\n\n", *lines]) if lines else "All models were measured.\n"


def _left(found: Rate) -> str:
    count = len(found.left)
    if not found.outcomes and not found.eager_failed:
        return f"all {count} models"
    return f"{count} models: {', '.join(found.left)}"


def _rate(run: Run, key: _Kind, cells: Sequence[Cell], several: bool) -> Rate:
    measured = [run.outcomes[cell] for cell in cells if cell in run.outcomes]
    judged = [outcome for outcome in measured if not outcome.eager_failed]
    left = [cell.model for cell in cells if cell not in run.outcomes]
    name = f"`{short(key[0])}`" + (f" ({describe_mode(key[1:])})" if several else "")
    return Rate(name, judged, len(measured) - len(judged), left)


def _line(found: Rate) -> list[str]:
    of, statuses = len(found.outcomes), Counter(o.status for o in found.outcomes)
    return [
        found.name,
        f"{found.passed}/{of}",
        f"{found.passed / of:.1%}" if of else "-",
        *(str(statuses[status]) for status in _FAILURES),
        str(found.eager_failed),
        str(len(found.left)),
        _operators(found.outcomes),
        str(sum(outcome.breaks or 0 for outcome in found.outcomes)) if of else "-",
    ]


def _operators(outcomes: Sequence[Outcome]) -> str:
    """Returns those left to eager, of all; "-" for backends that do not report them."""
    known = [o for o in outcomes if o.ops_on_backend is not None]
    if not known:
        return "-"
    in_eager = sum(o.ops_fallback or 0 for o in known)
    return f"{in_eager} of {in_eager + sum(o.ops_on_backend or 0 for o in known)}"


def _as_cell(reason: str) -> str:
    text = " ".join(reason.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


_HEADS = (
    "pass", "pass rate", "× eager", "lowest", "faster", "slower", "cold s", "warm s", "memory",
)  # fmt: skip


def caption(run: Run, file: str) -> str:
    """Command, date, sizes, processor and versions in one sentence, and what is left.

    Args:
        run: What was measured.
        file: See `conditions`.
    """
    left = f" {len(run.outcomes)} of {len(run.cells)} cells are measured." if run.left else ""
    return conditions(run.context, run.command, file) + left


def conditions(facts: Mapping[str, Any], command: str, file: str) -> str:
    """Returns in one sentence when, how and on what something was measured.

    Args:
        facts: What results depend on, as `bench.environment` has it, with the date.
        command: What measures them.
        file: Where the page finds the results, which have the versions of all packages.
    """
    torch = facts.get("versions", {}).get("torch")
    threads = f", {threads_in_words(facts['torch_threads'])}" if "torch_threads" in facts else ""
    sizes = ", small versions of the models" if facts.get("scale") == "test" else ""
    link = f"[results with all versions]({file})"
    return (
        f"Measured on {facts.get('date')} by `{command}`{sizes} on "
        f"{_device(facts)}{threads} (torch {torch}, Python {facts.get('python')}; {link})."
    )


def _device(facts: Mapping[str, Any]) -> Any:
    if facts.get("device") != "cuda":
        return facts.get("processor")
    driver = facts.get("driver")
    return f"{facts.get('cuda')}, driver {driver}" if driver else facts.get("cuda")


def backends_table(run: Run) -> str:
    """Returns a line per backend, in Markdown: pass rate, speedup, compile time, memory."""
    found = summaries(run)
    several = len({s.key[1:] for s in found}) > 1
    head = ["backend", *(["mode"] if several else []), *_HEADS]
    rows = [
        [f"`{short(s.key[0])}`", *([s.kind] if several else []), *summary_cells(s)] for s in found
    ]
    return table(head, rows, words=2 if several else 1)


def models_table(run: Run) -> str:
    """Returns a line per model and a column per backend, in Markdown: speedup, or what is wrong."""
    backends = list(dict.fromkeys(cell.backend for cell in run.outcomes))
    chose = {cell.backend for cell, outcome in run.outcomes.items() if outcome.chosen}
    choosing = [backend for backend in backends if backend in chose]
    rows: dict[tuple[str, str], dict[str, Outcome]] = {}
    several = len({_kind(cell) for cell in run.outcomes}) > 1
    for cell, outcome in run.outcomes.items():
        rows.setdefault((cell.model, _kind(cell)), {})[cell.backend] = outcome
    lines = [
        [
            model,
            *([kind] if several else []),
            _eager_ms(found),
            *(_cell(found.get(b)) for b in backends),
            *(chosen_text(found[b].chosen) if b in found else "" for b in choosing),
        ]
        for (model, kind), found in rows.items()
    ]
    means = [_mean(run, backend) for backend in backends]
    lines.append(
        ["geometric mean", *([""] if several else []), "", *means, *("" for _ in choosing)]
    )
    head = ["model", *(["mode"] if several else []), "eager ms"]
    head += [f"`{short(b)}`" for b in backends]
    head += [f"chosen by `{short(b)}`" for b in choosing]
    return table(head, lines, words=2 if several else 1)


def means_table(run: Run) -> str:
    """The result in a sentence, and the geometric means in one line with a column per backend."""
    backends = list(dict.fromkeys(cell.backend for cell in run.outcomes))
    means = [_mean(run, backend) for backend in backends]
    line = table([f"`{short(backend)}`" for backend in backends], [means], words=0)
    return f"{headline(run)}\n\n{line}"


def choices_text(run: Run) -> str:
    """Returns how often a backend that chooses chose which candidate."""
    return "\n\n".join(choices(run))


TABLES: Mapping[str, Callable[[Run], str]] = {
    "backends": backends_table,
    "models": models_table,
    "means": means_table,
    "choices": choices_text,
    "rates": rates_text,
}
"""What a page can ask for."""


def chart(run: Run) -> str:
    """Returns an SVG file: a dot for each model that a backend passes, its speedup over eager.

    A bar goes from the first to the third quartile of the models, a mark stands at the geometric
    mean.

    Raises:
        OptionError: jinja2 is not installed.
    """
    found, several = [], len({_kind(cell) for cell in run.outcomes}) > 1
    for s in summaries(run):
        if s.key[0] == EAGER:
            continue
        ratios = _speedups(run, lambda cell, s=s: _key(cell) == s.key)  # type: ignore[misc]
        name = short(s.key[0]) + (f" ({s.kind})" if several else "")
        if not ratios or s.speedup is None:
            found.append(Series(name, failure="passes no model"))
            continue
        low, high = (ratios[0],) * 2 if len(ratios) == 1 else _quartiles(ratios)
        found.append(Series(name, ratios, (s.speedup, low, high)))
    title = f"Times as fast as eager, {short(run.context['suite'])}: a dot is a model"
    return render("chart.svg", panel=panel(title, found))


def _quartiles(ratios: Sequence[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return first, third


def _key(cell: Cell) -> tuple[str, str, str, int | None]:
    return cell.backend, cell.mode, cell.dtype, cell.batch


def _kind(cell: Cell) -> str:
    return describe_mode((cell.mode, cell.dtype, cell.batch))


def _speedups(run: Run, of: Callable[[Cell], bool]) -> list[float]:
    return [
        outcome.speedup.value
        for cell, outcome in run.outcomes.items()
        if of(cell) and outcome.passed and outcome.speedup is not None
    ]


def _mean(run: Run, backend: str) -> str:
    ratios = _speedups(run, lambda cell: cell.backend == backend)
    return as_ratio(geometric_mean(ratios)) if ratios else "-"


def _eager_ms(found: Mapping[str, Outcome]) -> str:
    medians = [statistics.median(o.eager_s) for o in found.values() if o.eager_s]
    return f"{statistics.median(medians) * 1e3:.3g}" if medians else "-"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.passed and outcome.speedup is not None:
        return as_ratio(outcome.speedup.value)
    return outcome.status
