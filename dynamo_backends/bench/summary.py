"""Summarizes a run by backend: pass rate, speedup, compile time, memory."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dynamo_backends.bench.cells import EAGER, Cell, Outcome, Run, as_ratio, short
from dynamo_backends.bench.statistics import adjusted, geometric_mean

LEVEL = 0.05
"""P-values below are called significant."""

_NAMED = 3  # backends in the headline besides the best

Key = tuple[str, str, str, int | None]
"""Backend, mode, dtype and batch size."""


@dataclass(frozen=True)
class Summary:
    """A backend in one mode, dtype and batch size.

    Attributes:
        key: Which.
        passed: How many models it runs and gets right.
        of: Number of those that eager can run.
        eager_failed: How many eager cannot run, or not twice alike.
        speedup: Geometric mean over those that pass; None if none does.
        lowest: The model with the smallest, and that.
        faster: How many are significantly faster than eager (see `adjusted`).
        slower: How many are significantly slower.
        cold_s: Median seconds of the first call with empty caches.
        warm_s: Median seconds of the first call in a second process.
        memory: Geometric mean of `Outcome.memory_ratio`.
    """

    key: Key
    passed: int
    of: int
    eager_failed: int
    speedup: float | None
    lowest: tuple[str, float] | None
    faster: int
    slower: int
    cold_s: float | None
    warm_s: float | None
    memory: float | None

    @property
    def pass_rate(self) -> float | None:
        """Passed, of what eager can run; None if that is nothing."""
        return self.passed / self.of if self.of else None

    @property
    def kind(self) -> str:
        """Mode, dtype and batch size in words."""
        return describe_mode(self.key[1:])

    @property
    def sentence(self) -> str:
        """The result in short."""
        passed = f"{short(self.key[0])} passes {self.passed} of {self.of} models"
        if self.speedup is None:
            return passed
        return f"{passed} and is {as_ratio(self.speedup)} times as fast as eager"

    @property
    def brief(self) -> str:
        """The same in fewer words."""
        speed = "" if self.speedup is None else f", {as_ratio(self.speedup)} times"
        return f"{short(self.key[0])}: {self.passed} of {self.of}{speed}"


def describe_mode(kind: Sequence[str | int | None]) -> str:
    """Describes mode, dtype and batch size, such as "inference, float32, batch 4"."""
    mode, dtype, batch = kind
    return f"{mode}, {dtype}" + ("" if batch is None else f", batch {batch}")


def summaries(run: Run) -> list[Summary]:
    """Returns each backend's, those that pass most and then the fastest first within a kind."""
    groups: dict[Key, dict[Cell, Outcome]] = {}
    for cell, outcome in run.outcomes.items():
        key = cell.backend, cell.mode, cell.dtype, cell.batch
        groups.setdefault(key, {})[cell] = outcome
    found = [_summary(key, outcomes) for key, outcomes in groups.items()]
    kinds = list(dict.fromkeys(s.key[1:] for s in found))
    return sorted(
        found,
        key=lambda s: (kinds.index(s.key[1:]), -(s.pass_rate or 0.0), -(s.speedup or 0.0)),
    )


def headline(run: Run) -> str:
    """Returns what the run says, in one sentence."""
    found = [s for s in summaries(run) if s.key[0] != EAGER] or summaries(run)
    if not found:
        return "Nothing has been measured yet."
    best, *others = found
    shown = [s.brief for s in others[:_NAMED]]
    if len(others) > _NAMED:
        shown.append(f"{len(others) - _NAMED} more in the table")
    mean = "" if best.speedup is None else "; geometric mean"
    text = "; ".join([f"{best.sentence} ({best.kind}{mean})", *shown])
    missing = f" {len(run.outcomes)} of {len(run.cells)} cells are measured." if run.left else ""
    return f"{text}.{missing}"


def choices(run: Run) -> list[str]:
    """A sentence for each backend that chooses among candidates: how often it chose which."""
    found: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for cell, outcome in run.outcomes.items():
        if outcome.chosen:
            graphs, models = found.setdefault(cell.backend, (Counter(), Counter()))
            graphs.update(outcome.chosen)
            models.update(set(outcome.chosen))
    return [
        f"{short(backend)} chose, counted by graphs: {_counted(graphs)}; counted by models: "
        f"{_counted(models)}."
        for backend, (graphs, models) in found.items()
    ]


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in found.most_common())


def chosen_text(chosen: Iterable[str]) -> str:
    """Returns who runs a model's graphs, with how many if there are several: "ov (2), onnxrt"."""
    counted = Counter(chosen).most_common()
    return ", ".join(name if n == 1 else f"{name} ({n})" for name, n in counted)


def significant(outcomes: Iterable[Outcome]) -> dict[int, float]:
    """Returns adjusted p-values of passing outcomes, by `id` of the outcome."""
    tested = {
        id(o): o.speedup.p
        for o in outcomes
        if o.passed and o.speedup is not None and o.speedup.p is not None
    }
    return dict(zip(tested, adjusted([*tested.values()]), strict=True))


def _summary(key: Key, outcomes: dict[Cell, Outcome]) -> Summary:
    judged = {c: o for c, o in outcomes.items() if not o.eager_failed}
    passed = {c: o for c, o in judged.items() if o.passed}
    speedups = {c.model: o.speedup.value for c, o in passed.items() if o.speedup is not None}
    lowest = min(speedups, key=speedups.__getitem__, default=None)
    ps = significant(passed.values())
    clear = [o.speedup.value for o in passed.values() if o.speedup and ps.get(id(o), 1.0) < LEVEL]
    return Summary(
        key=key,
        passed=len(passed),
        of=len(judged),
        eager_failed=len(outcomes) - len(judged),
        speedup=geometric_mean(speedups.values()) if speedups else None,
        lowest=None if lowest is None else (lowest, speedups[lowest]),
        faster=sum(value > 1 for value in clear),
        slower=sum(value < 1 for value in clear),
        cold_s=_over(statistics.median, (o.compile_cold_s for o in passed.values())),
        warm_s=_over(statistics.median, (o.compile_warm_s for o in passed.values())),
        memory=_over(geometric_mean, (o.memory_ratio for o in passed.values())),
    )


def _over(
    function: Callable[[Sequence[float]], float], values: Iterable[float | None]
) -> float | None:
    known = [value for value in values if value is not None]
    return function(known) if known else None
