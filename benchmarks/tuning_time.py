"""How much speed autotune finds in how much time, without any decision on disk.

    python benchmarks/tuning_time.py --json times.json     # a call with the same file goes on
    python benchmarks/tuning_time.py --budgets 20 600 --models resnet50 bert
    python benchmarks/tuning_time.py --json times.json --minutes 60 # begins none later than that
    python benchmarks/tuning_time.py --json times.json --every onnxrt ov inductor_freezing

Each model and budget is a process of its own with empty caches: the first call tunes, and then
eager and what it chose are timed in turns. The table shows speedups over eager and the seconds of
the first call. `--every` has the longest budget try all these candidates, also those that the
prior leaves out; the file of results is then one that `dynamo-backends cache import` takes.

The exit status is 1 if a budget of 20 s finds less than 92% of the speed of the longest one, in the
geometric mean, if a model is slower than in eager, or if a result is wrong.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

import harness
from dynamo_backends.autotune.decisions import FORMAT, DecisionStore
from dynamo_backends.bench.results_files import ResultError
from harness.kept import Results

BUDGETS = (5, 20, 60, 120, 600)
SUITES = ("classic", "transformers")
OF_EACH_SUITE = 10
JUDGED_S = 20
OF_LONGEST = 0.92
LEAST_OF_EAGER = 0.98  # what two loops in eager differ by
_PATIENCE_S = 1800.0


class Recorded(harness.Kept):
    """Also has autotune's decisions in the form of `dynamo-backends cache export`."""

    def extra(self) -> dict[str, Any]:
        """See `Kept.extra`."""
        found = {n: r["decisions"] for n, r in self.results.items() if r.get("decisions")}
        return {
            "format": FORMAT,
            "decisions": [d for some in found.values() for d in some],
            "models": {d["key"]: n.split("/")[1] for n, some in found.items() for d in some},
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.model_arguments(__doc__, rounds=20)
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS), metavar="S")
    parser.add_argument(
        "--every", nargs="+", default=[], metavar="NAME", help="candidates of the longest budget"
    )
    parser.add_argument("--minutes", type=float, help="begin no measurement later than that")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    try:
        models = chosen(settings)
        kept = Recorded(settings, "tuning_time", ("scale", "batch", "rounds", "every"))
    except (ValueError, ResultError) as error:
        return harness.refused(error, console)
    # All budgets of a model, then the next: what is kept of an interrupted run can be compared.
    names = [f"{model}/{budget:g}" for model in models for budget in settings.budgets]
    kept.measure_left(names, lambda name: in_a_process(name, settings), console)
    console.print(table(models, settings.budgets, kept.results))
    return kept.status(problems(models, settings.budgets, kept.results), console)


def chosen(settings: argparse.Namespace) -> list[str]:
    """Suite and name of each model: ten of each suite, or the named ones.

    Raises:
        ValueError: A model does not exist.
    """
    if not settings.models:
        suites = {name: harness.suite(name, settings.scale, settings.batch) for name in SUITES}
        return [f"{suite}/{c.name}" for suite, some in suites.items() for c in some[:OF_EACH_SUITE]]
    return harness.named_models(settings, SUITES)


def in_a_process(name: str, settings: argparse.Namespace) -> Any:
    """Tunes and times a model in a fresh process with empty caches."""
    every = settings.every if name.endswith(f"/{max(settings.budgets):g}") else []
    case = name, settings.scale, settings.batch, settings.rounds, every
    return harness.call_apart(measured, *case, timeout_s=_PATIENCE_S)


@torch.no_grad()
def measured(
    name: str, scale: Any, batch: int, rounds: int, every: Sequence[str]
) -> dict[str, Any]:
    """The figures of one model with one budget."""
    suite, model, budget = name.split("/")
    case = harness.find_case(suite, model, scale, batch)
    options = {"autotune": {"budget_s": float(budget), "candidates": tuple(every)}}
    (result,) = harness.measure(
        case.make(), case.inputs(), ["autotune"], rounds=rounds, options=options
    )
    compiled, timing = result.compiled, result.timing
    if compiled is None or timing is None:
        return {"error": result.error or "its results are wrong"}
    ratio = timing.speedup
    return {
        "speedup": ratio.value,
        "speedup_95": [ratio.low, ratio.high],
        "first_call_s": compiled.first_call_s,
        "chosen": sorted({r.chosen for r in compiled.reports if r.chosen}),
        "decisions": [d.to_dict() for d in DecisionStore().all()] if every else [],
    }


def mean(models: Sequence[str], budget: float, results: Results) -> float | None:
    """Geometric mean of the speedups with a budget; None if one is missing."""
    found = [results.get(f"{model}/{budget:g}", {}).get("speedup") for model in models]
    return None if None in found else harness.geometric_mean(found)


def table(models: Sequence[str], budgets: Sequence[float], results: Results) -> Table:
    """One line per model: speedup, seconds, and who was chosen with the longest budget."""
    lines = []
    for model in models:
        rows = [results.get(f"{model}/{budget:g}") for budget in budgets]
        names = ", ".join((rows[-1] or {}).get("chosen", ()))
        lines.append([model.partition("/")[2], *map(cell, rows), names])
    means = [mean(models, budget, results) for budget in budgets]
    lines.append(["geometric mean", *("-" if m is None else f"{m:.2f}" for m in means), ""])
    heads = "model", *(f"{budget:g} s" for budget in budgets), "chosen"
    return harness.table(heads, lines, "speedup over eager (seconds of the first call)")


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """The table of results that were kept."""
    results: Results = content["results"]
    models = list(dict.fromkeys(name.rpartition("/")[0] for name in results))
    budgets = sorted({float(name.rpartition("/")[2]) for name in results})
    return [table(models, budgets, results)]


def cell(row: Mapping[str, Any] | None) -> str:
    """What a table shows of a measurement."""
    if row is None:
        return "-"
    if "error" in row:
        return "failed"
    return f"{row['speedup']:.2f} ({row['first_call_s']:.0f})"


def problems(models: Sequence[str], budgets: Sequence[float], results: Results) -> list[str]:
    """What is not as it should be."""
    found = [f"{name}: {row['error']}" for name, row in results.items() if "error" in row]
    found += [
        f"{name}: {row['speedup']:.2f} times as fast as eager"
        for name, row in results.items()
        if row.get("speedup_95", [1, 1])[1] < LEAST_OF_EAGER
    ]
    short, longest = (mean(models, b, results) for b in (JUDGED_S, max(budgets)))
    if short is not None and longest is not None and short < OF_LONGEST * longest:
        found.append(f"{JUDGED_S} s find {short / longest:.0%} of the speed of {max(budgets):g} s")
    return found


if __name__ == "__main__":
    sys.exit(main())
