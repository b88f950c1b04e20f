"""Peak memory of training steps: one graph per step against eager.

    python benchmarks/training_memory.py
    python benchmarks/training_memory.py --models resnet18 vit_s_16

Each kind of step is measured in a process of its own, with the models of `training.py`. "a step" is
by how much the process grows in a step, beside parameters and the optimizer's state, which it has
before; "process" is the largest size then, with the code of torch and of the compilers. Medians of
some processes: eager's malloc may find its memory in one piece or not.
"""

import argparse
import gc
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import track
from rich.table import Table

import harness
import training
from dynamo_backends.runtime.freed_memory import return_free_memory

COLUMNS = {
    str(column): column
    for column in training.columns_of(["inductor", "openxla"])
    if column.kind != "torch.compile"
}
WARMUP = 3
STEPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a compiled step takes more memory than eager's."""
    settings = parse(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    if not training.are_known(settings.models, console):
        return 2
    rows: dict[str, dict[str, dict[str, float]]] = {name: {} for name in settings.models}
    cases = [(name, column) for name in settings.models for column in COLUMNS]
    for name, column in track(cases, "measuring", console=console, transient=True):
        found = [in_a_process(settings, name, column) for _ in range(settings.rounds)]
        rows[name][column] = {key: statistics.median(f[key] for f in found) for key in found[0]}
    console.print(table(rows))
    if settings.json:
        harness.save_json(settings.json, "training_memory", [rows], settings=vars(settings))
    larger = [
        f"{name}: {column}"
        for name, row in rows.items()
        for column in list(COLUMNS)[1:]
        if row[column]["step"] > row[training.EAGER]["step"]
    ]
    console.print(f"above eager: {', '.join(larger) or 'none'}")
    return 1 if larger else 0


def table(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """MiB by model and kind of step."""
    found = Table(title="memory of training steps, MiB")
    found.add_column("model")
    for column in COLUMNS:
        found.add_column(f"{column}: a step", justify="right")
        found.add_column("process", justify="right")
    for name, row in rows.items():
        sizes = (row[column][key] / 2**20 for column in COLUMNS for key in ("step", "process"))
        found.add_row(name, *(f"{size:.0f}" for size in sizes))
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"][0])]


def in_a_process(settings: argparse.Namespace, name: str, column: str) -> dict[str, Any]:
    """Trains in a fresh process with an empty cache folder."""
    command = [__file__, "--child", column, "--models", name]
    command += ["--batch", str(settings.batch), "--scale", settings.scale]
    with tempfile.TemporaryDirectory() as folder:
        return harness.run_child(command, {"DYNAMO_BACKENDS_CACHE": folder})


def child(settings: argparse.Namespace) -> int:
    """Trains, and hands back by how much steps grow the process, and its largest size then."""
    (name,) = settings.models
    case = harness.find_case(training.MODELS[name], name, settings.scale, settings.batch)
    step = training.make_step(case, COLUMNS[settings.child])
    for _ in range(WARMUP):
        step()
    gc.collect()
    return_free_memory()
    before = harness.rss_bytes()
    harness.reset_peak_rss()
    for _ in range(STEPS):
        step()
    peak = harness.peak_rss_bytes()
    harness.hand_back(step=peak - before, process=peak)
    return 0


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=3, models=list(training.MODELS))
    parser.add_argument("--child", metavar="COLUMN", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
