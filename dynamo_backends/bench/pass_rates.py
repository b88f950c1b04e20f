"""Tables of whether models pass, in Markdown: for runs that are about results, not about time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_backends.bench.cells import Cell, Outcome, Run, Status, short
from dynamo_backends.bench.markdown import table
from dynamo_backends.bench.summary import in_words

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
    """What a backend does with the models of a run, in one mode, dtype and batch size.

    Attributes:
        name: The backend, and the mode if the run has several.
        outcomes: Of the models that eager can run.
        eager_failed: How many it cannot run, or not twice alike.
        left: Models that were not run.
    """

    name: str
    outcomes: Sequence[Outcome]
    eager_failed: int
    left: Sequence[str]

    @property
    def passed(self) -> int:
        """How many pass."""
        return sum(outcome.passed for outcome in self.outcomes)


def rates(run: Run) -> list[Rate]:
    """Of each backend, in the order of the run."""
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
        return "No model that was run fails.\n"
    return table(["model", "backend", "status", "reason"], rows, words=4)


def left_list(run: Run) -> str:
    """Returns the models that were not run, by backend; a sentence if all were."""
    lines = [f"- {found.name}: {_left(found)}\n" for found in rates(run) if found.left]
    return "".join(["Not run:\n\n", *lines]) if lines else "Every model was run.\n"


def _left(found: Rate) -> str:
    count = len(found.left)
    if not found.outcomes and not found.eager_failed:
        return f"all {count} models"
    return f"{count} models: {', '.join(found.left)}"


def _rate(run: Run, key: _Kind, cells: Sequence[Cell], several: bool) -> Rate:
    measured = [run.outcomes[cell] for cell in cells if cell in run.outcomes]
    judged = [outcome for outcome in measured if not outcome.eager_failed]
    left = [cell.model for cell in cells if cell not in run.outcomes]
    name = f"`{short(key[0])}`" + (f" ({in_words(key[1:])})" if several else "")
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
