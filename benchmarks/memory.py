"""Peak memory of compiling and running a model, above that of running it in eager.

    python benchmarks/memory.py

Each is measured in a process of its own, which imports the same packages either way: what the XLA
runtime takes when it is merely started is shown as a line of its own.
"""

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import nn

from dynamo_backends import bench

CALLS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a limit was given and is exceeded."""
    settings = parse(arguments)
    if settings.child:
        return child(settings)
    console = bench.make_console()
    console.print(f"[dim]{bench.environment_line()}[/]")
    kinds = {
        "eager": "eager",
        "started": f"eager, {settings.backend} started",
        "compiled": f"compiled with {settings.backend}",
    }
    runs: dict[str, list[dict[str, int]]] = {kind: [] for kind in kinds}
    order = [kind for _ in range(settings.rounds) for kind in kinds]
    for kind in track(order, "measuring", console=console, transient=True):
        runs[kind].append(in_a_process(settings, kind))
    peaks, ends = (
        {kind: statistics.median(run[key] for run in measured) for kind, measured in runs.items()}
        for key in ("peak", "end")
    )
    weights = runs["eager"][0]["weights"]
    table = Table("run", "peak MB", "above eager MB", "× the weights", "at the end MB")
    table.title = f"{settings.model}: {weights / 1e6:.0f} MB of weights"
    for kind, text in kinds.items():
        above = peaks[kind] - peaks["eager"]
        row = [f"{size / 1e6:.0f}" for size in (peaks[kind], above, ends[kind])]
        table.add_row(text, *row[:2], f"{above / weights:.2f}", row[2])
    console.print(table)
    multiple = (peaks["compiled"] - peaks["eager"]) / weights
    console.print(f"compile and run: {multiple:.2f} × the weights above eager")
    if settings.json:
        bench.save_json(settings.json, "memory", [runs], settings=vars(settings))
    return 1 if settings.limit is not None and multiple > settings.limit else 0


def in_a_process(settings: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Runs the model in a fresh process with an empty cache folder."""
    command = [__file__, "--child", kind, "--model", settings.model]
    command += ["--batch", str(settings.batch), "--backend", settings.backend]
    with tempfile.TemporaryDirectory() as folder:
        return bench.run_child(command, {"DYNAMO_BACKENDS_CACHE": folder})


@torch.no_grad()
def child(settings: argparse.Namespace) -> int:
    """Runs the model and hands back the largest size of the process, in bytes."""
    case = bench.find_cases(bench.suite("classic", batch=settings.batch), [settings.model])[0]
    model, inputs = case.make(), case.inputs()
    gc.collect()
    bench.reset_peak_rss()  # what making the weights took is not of interest
    run: Callable[..., Any] = model
    if settings.child == "started":
        tiny = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).eval()
        bench.compile_model(tiny, (torch.ones(2, 4),), settings.backend)
    if settings.child == "compiled":
        run = bench.compile_model(model, inputs, settings.backend).function
    for _ in range(CALLS):
        run(*inputs)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    gc.collect()
    bench.hand_back(peak=bench.peak_rss_bytes(), end=bench.rss_bytes(), weights=weights)
    return 0


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="of the classic suite")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, metavar="MULTIPLE", help="largest that passes")
    parser.add_argument("--json", metavar="FILE", help="save the results")
    parser.add_argument("--child", metavar="KIND", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
