"""What capture alone costs: ten models through Dynamo with the backend "eager", against eager.

    python benchmarks/capture_overhead.py
    python benchmarks/capture_overhead.py --models resnet18 bert --rounds 40

Both run the same kernels; what compiled code adds is guards, dispatch and the call of the graph,
what it saves is Python between the operators. The two are timed interleaved; an overhead is the
median time under capture over eager's, less 1, with a 95% bootstrap interval. The exit status is 1
if the mean or the worst exceeds its limit, or if a result differs from eager's.
"""

import argparse
import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import harness


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    settings = parse(arguments)
    console = harness.make_console()
    cases = harness.chosen_cases(settings, console)
    if not cases:
        return 2
    console.print(f"[dim]{harness.environment_line()}[/]")
    results = measure(cases, settings, console)
    console.print(table(results, settings))
    overheads = [overhead(result) for result in results if result.timing is not None]
    if settings.json:
        records = [harness.as_record(result) for result in results]
        harness.save_json(settings.json, "capture overhead", records, settings=vars(settings))
    if len(overheads) < len(results):
        return 1
    mean, worst = statistics.mean(overheads), max(overheads)
    console.print(f"mean {mean:+.2%}, worst {worst:+.2%}")
    return int(mean > settings.mean_limit or worst > settings.worst_limit)


def measure(
    cases: Sequence[harness.ModelCase], settings: argparse.Namespace, console: Console
) -> list[harness.Result]:
    """Measures each model; drops each before the next is made."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    steps = 1 + settings.rounds
    results: list[harness.Result] = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases) * steps)
        for i, case in enumerate(cases):

            def step(what: str, name: str = case.name) -> None:
                progress.update(task, description=f"{name}: {what}", advance=1)

            with torch.no_grad():
                measured = harness.measure_case(
                    case, ["eager"], rounds=settings.rounds, on_step=step
                )
            results += [result.without_model() for result in measured]
            progress.update(task, completed=(i + 1) * steps)
            del measured
            torch.compiler.reset()
            gc.collect()
    return results


def overhead(result: harness.Result) -> float:
    """Relative time that capture adds; negative if it saves some."""
    assert result.timing is not None
    return 1 / result.timing.speedup.value - 1


def table(results: Sequence[harness.Result], settings: argparse.Namespace) -> Table:
    """The results for people."""
    shown = Table(title=f"capture alone, batch {settings.batch}, inference")
    shown.add_column("model")
    for name in ("eager\nms", "captured\nms", "overhead\n\\[95% CI]", "\ngraphs", "\nequal"):
        shown.add_column(name, justify="right")
    for result in results:
        if result.eager is None or result.timing is None or result.compiled is None:
            shown.add_row(result.model, "", "", result.error, "", "[bold red]NO[/]")
            continue
        ratio = result.timing.speedup
        shown.add_row(
            result.model,
            f"{result.eager.median * 1e3:.2f}",
            f"{result.timing.median * 1e3:.2f}",
            rf"{overhead(result):+.2%} \[{1 / ratio.high - 1:+.2%}, {1 / ratio.low - 1:+.2%}]",
            f"{result.compiled.graphs}",
            "[green]yes[/]",
        )
    return shown


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=40)
    parser.add_argument("--mean-limit", type=float, default=0.01, metavar="SHARE")
    parser.add_argument("--worst-limit", type=float, default=0.03, metavar="SHARE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
