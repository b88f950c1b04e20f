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
from collections.abc import Mapping, Sequence
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
    records = [harness.as_record(result) for result in results]
    console.print(table(records, settings.batch))
    if settings.json:
        harness.save_json(settings.json, "capture overhead", records, settings=vars(settings))
    overheads = overheads_of(records)
    if len(overheads) < len(results):
        return 1
    console.print(sentence(overheads))
    mean, worst = statistics.mean(overheads), max(overheads)
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


def overheads_of(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Relative time that capture adds to each model that ran; negative if it saves some."""
    return [1 / record["ratio"] - 1 for record in records if record["ratio"]]


def sentence(overheads: Sequence[float]) -> str:
    """All models in short."""
    return f"mean {statistics.mean(overheads):+.2%}, worst {max(overheads):+.2%}"


def table(records: Sequence[Mapping[str, Any]], batch: int) -> Table:
    """The results for people."""
    shown = Table(title=f"capture alone, batch {batch}, inference")
    shown.add_column("model")
    for name in ("eager\nms", "captured\nms", "overhead\n\\[95% CI]", "\ngraphs", "\nequal"):
        shown.add_column(name, justify="right")
    for record in records:
        if not record["ratio"]:
            shown.add_row(record["model"], "", "", record["error"], "", "[bold red]NO[/]")
            continue
        low, high = record["ratio_95"]
        shown.add_row(
            record["model"],
            f"{record['eager_ms']:.2f}",
            f"{record['ms']:.2f}",
            rf"{1 / record['ratio'] - 1:+.2%} \[{1 / high - 1:+.2%}, {1 / low - 1:+.2%}]",
            f"{record['graphs']}",
            "[green]yes[/]",
        )
    return shown


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    records = content["results"]
    return [table(records, content["settings"]["batch"]), sentence(overheads_of(records))]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=40)
    parser.add_argument("--mean-limit", type=float, default=0.01, metavar="SHARE")
    parser.add_argument("--worst-limit", type=float, default=0.03, metavar="SHARE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
