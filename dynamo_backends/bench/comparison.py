"""Two runs side by side: what became slower or faster, and what broke."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynamo_backends.bench.cells import Cell, Outcome, Run, as_ratio, short
from dynamo_backends.bench.results_files import differences
from dynamo_backends.bench.statistics import adjusted, p_of_groups
from dynamo_backends.bench.summary import LEVEL
from dynamo_backends.interface.notebooks import table_html

THRESHOLD = 0.05
"""Smaller changes of a speedup are none: processes differ from each other by some percent."""

_EAGERS = 1.1
"""Eager's times of two runs of one machine differ by no more than this factor, or it was busy."""

_MACHINE = ("processor", "cpus", "torch_threads")

Verdict = Literal["regression", "improvement", "same"]


@dataclass(frozen=True)
class Change:
    """A cell in both runs.

    Attributes:
        cell: Which.
        before: What came of it in the first run.
        after: The same in the second.
        verdict: What that is.
        ratio: Speedup over eager after, over that before; None unless both have one.
        low: Lower end of its 95% interval, from those of the two speedups.
        high: Upper end.
        p: Mann-Whitney's p-value of the rounds' speedups, adjusted for how many cells there are.
    """

    cell: Cell
    before: Outcome
    after: Outcome
    verdict: Verdict
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def text(self) -> str:
        """Returns what happened, in words."""
        eager = f"; {self.about_eager}" if self.about_eager else ""
        if self.ratio is None:
            reason = f" ({self.after.reason})" if self.after.reason else ""
            return f"{self.before.status} → {self.after.status}{reason}"
        first, second = self.before.speedup, self.after.speedup
        assert first is not None and second is not None
        return (
            f"{as_ratio(first.value)} → {as_ratio(second.value)} × eager: {self.ratio:.2f} "
            f"[{self.low:.2f}, {self.high:.2f}], p = {self.p:.2g}{eager}"
        )

    @property
    def about_eager(self) -> str:
        """Returns what eager's own times say of the machine, in words; empty: they agree."""
        took = _times_as_long(self.before.eager_s, self.after.eager_s)
        if self.ratio is None or 1 / _EAGERS <= took <= _EAGERS:
            return ""
        loads = [o.load for o in (self.before, self.after) if o.load is not None]
        others = " and ".join(f"{load:.1f}" for load in loads)
        had = f" (other processes used {others} CPUs)" if others else ""
        return f"eager took {took:.2f} times as long{had}"


@dataclass(frozen=True)
class Comparison:
    """The regressions and improvements between two runs.

    Attributes:
        changes: Each cell that both have, regressions first, then improvements.
        missing: Cells of the first that the second lacks.
        new: Cells of the second that the first lacks.
        contexts: In what the machines, versions and settings differ, in words.
    """

    changes: list[Change]
    missing: list[Cell] = field(default_factory=list)
    new: list[Cell] = field(default_factory=list)
    contexts: list[str] = field(default_factory=list)

    def of(self, verdict: Verdict) -> list[Change]:
        """Returns the changes with a verdict."""
        return [change for change in self.changes if change.verdict == verdict]

    def _repr_html_(self) -> str:
        """Returns it for Jupyter."""
        rows = ((c.verdict, c.cell.model, short(c.cell.backend), c.text) for c in self.changes)
        return table_html(self.headline, rows, ("", "model", "backend", "change"))

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        counts = {v: len(self.of(v)) for v in ("regression", "improvement", "same")}
        return (
            f"{_count(counts['regression'], 'regression')} and "
            f"{_count(counts['improvement'], 'improvement')} in "
            f"{_count(len(self.changes), 'cell')} that both runs have."
        )


def compare_runs(before: Run, after: Run, threshold: float = THRESHOLD) -> Comparison:
    """Compares two runs, cell by cell.

    A cell regresses if it passed and does not any more, or if its speedup over eager of the same
    rounds falls by more than the threshold and significantly. It improves in the opposite case,
    unless both runs are of the same processor, eager took longer in the second, and the backend was
    no faster than before: then eager's change explains it, as another program may.

    Args:
        before: The run that is the standard.
        after: The other.
        threshold: Share by which a speedup may change, 0 to 1.
    """
    both = [cell for cell in before.outcomes if cell in after.outcomes]
    pairs = [(before.outcomes[cell], after.outcomes[cell]) for cell in both]
    timed = [i for i, pair in enumerate(pairs) if all(o.passed and o.speedup for o in pair)]
    alike = all(before.context.get(k) == after.context.get(k) for k in _MACHINE)
    ps = adjusted([p_of_groups(*map(_speedups, pairs[i])) for i in timed])
    known = dict(zip(timed, ps, strict=True))
    changes = [
        _timed(cell, *pair, known[i], threshold, alike) if i in known else _status(cell, *pair)
        for i, (cell, pair) in enumerate(zip(both, pairs, strict=True))
    ]
    order = ("regression", "improvement", "same")
    changes.sort(key=lambda c: (order.index(c.verdict), c.ratio or 0.0))
    return Comparison(
        changes,
        [cell for cell in before.outcomes if cell not in after.outcomes],
        [cell for cell in after.outcomes if cell not in before.outcomes],
        differences(before.context, after.context),
    )


def table(changes: Sequence[Change]) -> Table:
    """Changes for a terminal."""
    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "model", "backend", "mode", "change"):
        found.add_column(name)
    for change in changes:
        style = {"regression": "bold red", "improvement": "green"}.get(change.verdict, "dim")
        cell = change.cell
        found.add_row(
            f"[{style}]{change.verdict}[/]",
            cell.model,
            short(cell.backend),
            f"{cell.mode} {cell.dtype}",
            change.text.replace("[", r"\["),
        )
    return found


def _speedups(outcome: Outcome) -> list[float]:
    """Eager's time over the backend's, by round."""
    rounds = zip(outcome.eager_s, outcome.backend_s, strict=True)
    return [math.log(eager / own) for eager, own in rounds]


def _times_as_long(before: Sequence[float], after: Sequence[float]) -> float:
    return statistics.median(after) / statistics.median(before) if before and after else 1.0


def _timed(
    cell: Cell, before: Outcome, after: Outcome, p: float, threshold: float, alike: bool
) -> Change:
    first, second = before.speedup, after.speedup
    assert first is not None and second is not None
    ratio = second.value / first.value
    low = ratio * math.exp(-_hypot(second.value / second.low, first.high / first.value))
    high = ratio * math.exp(_hypot(second.high / second.value, first.value / first.low))
    verdict: Verdict = "same"
    if p < LEVEL and not 1 - threshold <= ratio <= 1 / (1 - threshold):
        verdict = "regression" if ratio < 1 else "improvement"
    if verdict == "improvement" and alike:
        own = _times_as_long(before.backend_s, after.backend_s)
        eager = _times_as_long(before.eager_s, after.eager_s)
        if eager > _EAGERS and own > 1 - threshold:
            verdict = "same"
    return Change(cell, before, after, verdict, ratio, low, high, p)


def _hypot(one: float, other: float) -> float:
    """Two independent factors' widths together, as a logarithm."""
    return float(np.hypot(math.log(one), math.log(other)))


def _status(cell: Cell, before: Outcome, after: Outcome) -> Change:
    verdict: Verdict = "same"
    if before.passed != after.passed and not (before.eager_failed or after.eager_failed):
        verdict = "improvement" if after.passed else "regression"
    return Change(cell, before, after, verdict)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
