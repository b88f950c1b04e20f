"""Inference of ten classic models: compiled against eager, and whether the results are right.

    python benchmarks/xla_inference.py
    python benchmarks/xla_inference.py --models bert vit_s_16 --backend openxla --backend inductor

The backends and eager are timed interleaved; a ratio is eager's median over the backend's, with a
95% bootstrap interval. The exit status is 1 if a backend fails or a result is wrong.
"""

import argparse
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import harness
from dynamo_backends.bench.suites.case import call

OPTIONS = {"openxla": {"cache": False}}
"""Compile times are those of compiling, not of loading what an earlier run left on disk."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    settings = parse(arguments)
    console = harness.make_console()
    cases = harness.suite(settings.suite, settings.scale, settings.batch)
    try:
        cases = harness.find_cases(cases, settings.models) if settings.models else cases
    except ValueError as error:
        console.print(f"[red]{error}[/]")
        return 2
    backends = settings.backend or ["openxla"]
    if settings.inductor and "inductor" not in backends:
        backends.append("inductor")
    console.print(f"[dim]{harness.environment_line()}, device {settings.device}[/]")
    results, products = measure(cases, backends, settings, console)
    title = f"{settings.suite} models, batch {settings.batch}, {settings.device}, inference"
    console.print(harness.results_table(title, results))
    print_summary(results, console)
    if settings.json:
        records = [harness.as_record(result) for result in results]
        work = {name: asdict(each) for name, each in products.items()}
        harness.save_json(
            settings.json, "inference", records, settings=vars(settings), products=work
        )
    return 0 if all(result.passed for result in results) else 1


def measure(
    cases: Sequence[harness.ModelCase],
    backends: Sequence[str],
    settings: argparse.Namespace,
    console: Console,
) -> tuple[list[harness.Result], dict[str, harness.Products]]:
    """Measures each model, and on a CPU what it multiplies; drops each before the next is made."""
    steps = len(cases) * (len(backends) + settings.rounds)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    results: list[harness.Result] = []
    products: dict[str, harness.Products] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)
        for i, case in enumerate(cases):

            def step(what: str, name: str = case.name) -> None:
                shown = f"{name}: {'measure' if what == 'round' else what}"
                progress.update(task, description=shown, advance=1)

            with torch.no_grad():
                measured = harness.measure_case(
                    case,
                    backends,
                    settings.device,
                    rounds=settings.rounds,
                    options=OPTIONS,
                    synchronize=torch.cuda.synchronize if settings.device == "cuda" else None,
                    on_step=step,
                )
            results += [result.without_model() for result in measured]
            progress.update(task, completed=(i + 1) * (len(backends) + settings.rounds))
            del measured
            if settings.device == "cpu":
                products[case.name] = products_of(case)
            torch.compiler.reset()
            gc.collect()
    return results, products


def products_of(case: harness.ModelCase) -> harness.Products:
    """What a model multiplies in a call."""
    model, inputs = case.make().eval(), case.inputs()
    with torch.no_grad():
        return harness.products_of(lambda: call(model, inputs))


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    rows: dict[str, dict[str, Any]] = {}
    for record in content["results"]:
        rows.setdefault(record["model"], {})[record["backend"]] = record
    backends = list(dict.fromkeys(record["backend"] for record in content["results"]))
    work = {name: harness.Products(**each) for name, each in content.get("products", {}).items()}
    more = ["limit"] if work else []
    found = Table("model", "eager ms", *(f"`{name}`" for name in backends), *more)
    for model, of in rows.items():
        eager = next((r["eager_ms"] for r in of.values() if r["eager_ms"]), None)
        limit = work[model].limit(eager) if eager and model in work else None
        found.add_row(
            model,
            f"{eager:.1f}" if eager else "-",
            *(_speedup(of.get(n)) for n in backends),
            *(["-" if limit is None else f"{limit:.2f}"] if work else []),
        )
    means = []
    for name in backends:
        ratios = [of[name]["ratio"] for of in rows.values() if of.get(name, {}).get("passed")]
        means.append(f"{harness.geometric_mean(ratios):.2f}" if ratios else "-")
    found.add_row("geometric mean", "", *means, *([""] if work else []))
    return [found]


def _speedup(record: Mapping[str, Any] | None) -> str:
    if record is None or not record["passed"]:
        return "-" if record is None else "wrong or failed"
    return harness.format_ratio(harness.Ratio(record["ratio"], *record["ratio_95"]))


def print_summary(results: Sequence[harness.Result], console: Console) -> None:
    """Prints the mean speedup of each backend, and what was wrong."""
    for backend, found in harness.summarize(results).items():
        console.print(
            f"{backend}: geometric mean [bold]{found.mean:.2f}[/] × eager,"
            f" lowest {found.lowest:.2f}, over {found.models} models"
        )
    for result in results:
        if result.error:
            console.print(f"[red]{result.model} on {result.backend}:[/] {result.error}")
        for fallback in result.compiled.fallbacks if result.compiled else ():
            console.print(
                f"{result.model} on {result.backend}: in eager: {fallback.count}× {fallback.op}:"
                f" {fallback.reason}"
            )


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=20)
    parser.add_argument("--suite", default="classic", choices=list(harness.SUITES))
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="repeatable; default: openxla"
    )
    parser.add_argument("--inductor", action="store_true", help="measure torch's own as well")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
