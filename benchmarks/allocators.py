"""What a training step costs with several ways to keep its temporary memory in the process.

    python benchmarks/allocators.py
    python benchmarks/allocators.py --models resnet50 --rounds 5 --jemalloc /opt/libjemalloc.so.2

Each way has a process of its own, and these take turns: `kept` (this package's default: glibc keeps
what is freed), `none`, and a jemalloc that is preloaded and keeps it, too. "CPU s" are the user and
system time of a step, which other processes disturb less than its time.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import harness
import training

WAYS = ("kept", "none", "jemalloc")
WARMUP = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    settings = parse(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    ways = WAYS if Path(settings.jemalloc).exists() else WAYS[:-1]
    rows: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {way: [] for way in ways} for name in settings.models
    }
    cases = [(n, way) for n in settings.models for _ in range(settings.rounds) for way in ways]
    for name, way in track(cases, "measuring", console=console, transient=True):
        rows[name][way].append(in_a_process(settings, name, way))
    console.print(table(rows))
    if settings.json:
        harness.save_json(settings.json, "allocators", [rows], settings=vars(settings))
    return 0


def table(rows: Any) -> Table:
    """Medians by model and way."""
    found = Table(title="training steps on openxla, by what keeps their memory")
    for column in ("model", "way", "ms", "/ kept", "CPU s", "/ kept", "faults", "peak MiB"):
        found.add_column(column, justify="left" if column in ("model", "way") else "right")
    for name, ways in rows.items():
        medians = {
            way: {key: statistics.median(x[key] for x in runs) for key in runs[0]}
            for way, runs in ways.items()
        }
        first = medians["kept"]
        for way, x in medians.items():
            found.add_row(
                name, way, f"{1e3 * x['seconds']:.1f}", f"{x['seconds'] / first['seconds']:.2f}",
                f"{x['cpu']:.3f}", f"{x['cpu'] / first['cpu']:.2f}", f"{x['faults']:.0f}",
                f"{x['peak'] / 2**20:.0f}",
            )  # fmt: skip
    return found


def published(content: Any) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"][0])]


def in_a_process(settings: argparse.Namespace, name: str, way: str) -> dict[str, Any]:
    """Trains in a fresh process."""
    command = [__file__, "--child", way, "--models", name, "--steps", str(settings.steps)]
    command += ["--batch", str(settings.batch), "--scale", settings.scale]
    variables = {} if way == "kept" else {"DYNAMO_BACKENDS_RESERVE": "0"}
    if way == "jemalloc":
        variables |= {"LD_PRELOAD": settings.jemalloc}
        variables |= {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0"}
    return harness.run_child(command, variables)


def child(settings: argparse.Namespace) -> int:
    """Trains, and hands back what a step took."""
    (name,) = settings.models
    case = harness.find_case(training.MODELS[name], name, settings.scale, settings.batch)
    torch.manual_seed(0)
    step = training.make_step(case, training.Column("compile_step", "openxla"))
    for _ in range(WARMUP):
        step()
    found = []
    for _ in range(settings.steps):
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        step()
        end, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.append((end - start, cpu, after.ru_minflt - before.ru_minflt))
    seconds, cpu, faults = (statistics.median(column) for column in zip(*found, strict=True))
    harness.hand_back(seconds=seconds, cpu=cpu, faults=faults, peak=harness.peak_rss_bytes())
    return 0


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    models = ["resnet50", "bert", "vit_s_16", "mobilenet_v2"]
    parser = harness.model_arguments(__doc__, rounds=3, models=models)
    parser.add_argument("--steps", type=int, default=12, help="that are measured in a process")
    parser.add_argument("--jemalloc", default="/usr/lib/x86_64-linux-gnu/libjemalloc.so.2")
    parser.add_argument("--child", metavar="WAY", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
