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
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import harness
from dynamo_backends.autotune.decisions import Decisions
from dynamo_backends.bench.results_files import ResultError
from harness.kept import Recorded, Results, measure_left

BUDGETS = (5, 20, 60, 120, 600)
SUITES = ("classic", "transformers")
OF_EACH_SUITE = 10
JUDGED_S = 20
OF_LONGEST = 0.92
LEAST_OF_EAGER = 0.98  # what two loops in eager differ by
_PATIENCE_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    settings = parse(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    try:
        models = chosen(settings)
        kept = Recorded(settings.json, "tuning_time", context(settings))
    except (ValueError, ResultError) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 2
    # All budgets of a model, then the next: what is kept of an interrupted run can be compared.
    names = [f"{model}/{budget:g}" for model in models for budget in settings.budgets]
    left = measure_left(names, kept, lambda n: in_a_process(n, settings), console, settings.minutes)
    console.print(table(models, settings.budgets, kept.results))
    found = problems(models, settings.budgets, kept.results)
    for text in found:
        console.print(f"[red]{text}[/]", highlight=False)
    if left:
        console.print(f"{left} are left" + "; the same command goes on" * bool(settings.json))
    return 1 if found else 0


def chosen(settings: argparse.Namespace) -> list[str]:
    """Suite and name of each model: ten of each suite, or the named ones.

    Raises:
        ValueError: A model does not exist.
    """
    if not settings.models:
        suites = {name: harness.suite(name, settings.scale, settings.batch) for name in SUITES}
        return [f"{suite}/{c.name}" for suite, some in suites.items() for c in some[:OF_EACH_SUITE]]
    return harness.named_models(settings, SUITES)


def context(settings: argparse.Namespace) -> dict[str, Any]:
    """What results depend on."""
    facts = {name: getattr(settings, name) for name in ("scale", "batch", "rounds", "every")}
    return {**harness.environment(), **facts}


def in_a_process(name: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Tunes and times a model in a fresh process with empty caches."""
    command = [__file__, "--child", name, "--scale", settings.scale]
    command += ["--batch", str(settings.batch), "--rounds", str(settings.rounds)]
    if settings.every and name.endswith(f"/{max(settings.budgets):g}"):
        command += ["--every", *settings.every]
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "DYNAMO_BACKENDS_CACHE": f"{folder}/cache",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
        }
        return harness.run_child(command, caches, _PATIENCE_S)


@torch.no_grad()
def child(settings: argparse.Namespace) -> int:
    """Measures one model with one budget and hands the figures back."""
    suite, model, budget = settings.child.split("/")
    case = harness.find_case(suite, model, settings.scale, settings.batch)
    options = {"autotune": {"budget_s": float(budget), "candidates": tuple(settings.every)}}
    (result,) = harness.measure_case(case, ["autotune"], rounds=settings.rounds, options=options)
    compiled, timing = result.compiled, result.timing
    if compiled is None or timing is None:
        harness.hand_back(error=result.error or "its results are wrong")
        return 0
    ratio = timing.speedup
    harness.hand_back(
        speedup=ratio.value,
        speedup_95=[ratio.low, ratio.high],
        first_call_s=compiled.first_call_s,
        chosen=sorted({r.chosen for r in compiled.reports if r.chosen}),
        decisions=[d.to_dict() for d in Decisions().all()] if settings.every else [],
    )
    return 0


def mean(models: Sequence[str], budget: float, results: Results) -> float | None:
    """Geometric mean of the speedups with a budget; None if one is missing."""
    found = [results.get(f"{model}/{budget:g}", {}).get("speedup") for model in models]
    return None if None in found else harness.geometric_mean(found)


def table(models: Sequence[str], budgets: Sequence[float], results: Results) -> Table:
    """One line per model: speedup, seconds, and who was chosen with the longest budget."""
    shown = Table(title="speedup over eager (seconds of the first call)", box=SIMPLE_HEAD)
    shown.add_column("model")
    for budget in budgets:
        shown.add_column(f"{budget:g} s", justify="right")
    shown.add_column("chosen")
    for model in models:
        rows = [results.get(f"{model}/{budget:g}") for budget in budgets]
        names = ", ".join((rows[-1] or {}).get("chosen", ()))
        shown.add_row(model.partition("/")[2], *map(cell, rows), names)
    means = [mean(models, budget, results) for budget in budgets]
    shown.add_section()
    shown.add_row("geometric mean", *("-" if m is None else f"{m:.2f}" for m in means), "")
    return shown


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


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=20)
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS), metavar="S")
    parser.add_argument(
        "--every", nargs="+", default=[], metavar="NAME", help="candidates of the longest budget"
    )
    parser.add_argument("--minutes", type=float, help="begin no measurement later than that")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
