"""How long compiling takes: whole models, the comparison with eager in it, or training steps.

    python benchmarks/compile_time.py --json table.json  # the same call goes on
    python benchmarks/compile_time.py --share
    python benchmarks/compile_time.py --steps

Twelve models by Inductor and this package's backends, each in a process with empty caches, in a
second one, and in one that finds verdicts and choices but no graph; and exported and loaded by
hand. Whole first calls are counted. The exit status is 1 if, in the geometric mean, onnxrt or ov
takes more than 1.5 times as long as by hand, inductor_freezing more than 0.6 times as long as
inductor, openxla a quarter of that, or a second process more than 0.6 times as long as the first.
This is what --table says, too.

With --share: for every model of the classic suite, which part of the first call the comparison with
eager takes (the option `verify`), and by how much the process grows in that call with it and
without.

With --steps: CPU seconds of the parts of a first compiled step of AdamW, for 100 to 1,000
parameters. The exit status is 1 if the capture of 200 takes more than 6, or of 1,000 more than 40.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import harness
from dynamo_backends.bench.results_files import ResultError
from harness import captures, compilations

SHARES = "comparison"
CAPTURES = "captures"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if something takes longer than it may."""
    parser = harness.arguments(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--table", action="store_true", help="the default")
    which.add_argument("--share", action="store_true", help="what the comparison with eager takes")
    which.add_argument("--steps", action="store_true", help="the parts of a first compiled step")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--minutes", type=float, help="of the table: begin none later than that")
    parser.add_argument("--backend", default="openxla", help="with --share: this one")
    parser.add_argument(
        "--backends", nargs="+", default=["aot_eager", "openxla"], help="with --steps: only these"
    )
    parser.add_argument(
        "--parameters", nargs="+", type=int, default=list(captures.PARAMETERS), metavar="N",
        help="with --steps: of so many parameters",
    )  # fmt: skip
    settings = parser.parse_args(arguments)
    console = harness.announce()
    if settings.steps:
        return print_captures(settings, console)
    return (print_shares if settings.share else print_table)(settings, console)


def print_table(settings: argparse.Namespace, console: Console) -> int:
    """Measures what is left of the table, and prints it; the exit status."""
    every = compilations.cases(settings.batch)
    try:
        chosen = harness.find_cases(every, settings.models) if settings.models else every
        kept = harness.Kept(settings, "compilations", ("batch",))
    except (ValueError, ResultError) as error:
        return harness.refused(error, console)
    models = [case.name for case in chosen]
    names = [f"{model}/{who}" for model in models for who in compilations.WHO]
    kept.measure_left(names, lambda n: compilations.in_processes(n, settings.batch), console)
    console.print(compilations.table(models, kept.results))
    found = compilations.problems(models, kept.results)
    for text in compilations.means(models, kept.results):
        if text not in found:
            console.print(text, highlight=False)
    return kept.status(found, console)


def print_captures(settings: argparse.Namespace, console: Console) -> int:
    """Measures the capture of steps, and prints it; 1 if one takes longer than it may."""
    cases = [(n, backend) for backend in settings.backends for n in settings.parameters]
    rows = []
    for n, backend in track(cases, "compiling", console=console, transient=True):
        seconds = harness.call_apart(captures.measured, n, backend)
        rows.append({"parameters": n, "backend": backend, **seconds})
    harness.report(published, settings, CAPTURES, rows, console)
    found = captures.problems(rows)
    for text in found:
        console.print(f"[red]{text}[/]", highlight=False)
    return int(bool(found))


def print_shares(settings: argparse.Namespace, console: Console) -> int:
    """Prints the comparison's share of the first call of each model."""
    names = settings.models or [case.name for case in harness.suite("classic")]
    rows = []
    for name in track(names, "compiling", console=console, transient=True):
        case = name, settings.batch, settings.backend
        first, off = (harness.call_apart(first_call, *case, verify) for verify in ("first", "off"))
        rows.append({"model": name, "first": first, "off": off})
    harness.report(published, settings, SHARES, rows, console)
    return 0


@torch.no_grad()
def first_call(model_name: str, batch: int, backend: str, verify: str) -> dict[str, float]:
    """Compiles once: seconds, and by how much the process grows."""
    case = harness.find_case("classic", model_name, batch=batch)
    model, inputs = case.make(), case.inputs()
    before = harness.rss_bytes()
    compiled = harness.compile_model(model, inputs, backend, options={"verify": verify})
    return {
        "first_call_s": compiled.first_call_s,
        "verify_s": sum(r.verify_seconds for r in compiled.reports),
        "growth": harness.peak_rss_bytes() - before,
    }


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    results = content["results"]
    if content["kind"] == SHARES:
        return shares(results)
    if content["kind"] == CAPTURES:
        return [captures.table(results)]
    models = list(dict.fromkeys(name.partition("/")[0] for name in results))
    return [compilations.table(models, results), *compilations.means(models, results)]


def shares(results: Sequence[Mapping[str, Any]]) -> list[Table | str]:
    """One line per model, and a sentence."""
    rows, parts = [], []
    for row in results:
        first, off = row["first"], row["off"]
        parts.append(first["verify_s"] / first["first_call_s"])
        seconds = f"{first['first_call_s']:.2f}", f"{first['verify_s']:.3f}", f"{parts[-1]:.1%}"
        peaks = f"{first['growth'] / 2**20:.0f}", f"{off['growth'] / 2**20:.0f}"
        rows.append([row["model"], *seconds, *peaks, f"{first['growth'] / off['growth']:.2f}"])
    heads = "model", "first call s", "comparison s", "share", "grows MiB", "without", "ratio"
    said = f"the largest share is {max(parts):.1%}, the mean {statistics.mean(parts):.1%}"
    return [harness.table(heads, rows), said]


if __name__ == "__main__":
    raise SystemExit(main())
