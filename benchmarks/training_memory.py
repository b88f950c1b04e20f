"""Peak memory of training steps: one graph per step against eager.

    python benchmarks/training_memory.py
    python benchmarks/training_memory.py --models resnet18 vit_s_16

Each kind of step is measured in a process of its own, with the models of `training.py`. "a step" is
by how much the process grows in a step, beside parameters and the optimizer's state, which it has
before; "process" is the largest size then, with the code of torch and of the compilers. Medians of
some processes: eager's malloc may find its memory in one piece or not. The exit status is 1 if a
compiled step takes more memory than eager's.
"""

import gc
import statistics
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
    parser = harness.model_arguments(__doc__, rounds=3, models=list(training.MODELS))
    settings = parser.parse_args(arguments)
    console = harness.announce()
    if unknown := training.unknown_model(settings.models):
        return harness.refused(unknown, console)
    rows: dict[str, dict[str, dict[str, float]]] = {name: {} for name in settings.models}
    cases = [(name, column) for name in settings.models for column in COLUMNS]
    for name, column in track(cases, "measuring", console=console, transient=True):
        case = name, settings.scale, settings.batch, column
        found = [harness.call_apart(measured, *case) for _ in range(settings.rounds)]
        rows[name][column] = {key: statistics.median(f[key] for f in found) for key in found[0]}
    harness.report(published, settings, "training_memory", [rows], console)
    larger = [
        f"{name}: {column}"
        for name, row in rows.items()
        for column in list(COLUMNS)[1:]
        if row[column]["step"] > row[training.EAGER]["step"]
    ]
    console.print(f"above eager: {', '.join(larger) or 'none'}")
    return int(bool(larger))


def measured(name: str, scale: Any, batch: int, column: str) -> dict[str, int]:
    """Trains in this process: by how much steps grow it, and its largest size then."""
    case = harness.find_case(training.MODELS[name], name, scale, batch)
    step = training.make_step(case, COLUMNS[column])
    for _ in range(WARMUP):
        step()
    gc.collect()
    return_free_memory()
    before = harness.rss_bytes()
    harness.reset_peak_rss()
    for _ in range(STEPS):
        step()
    peak = harness.peak_rss_bytes()
    return {"step": peak - before, "process": peak}


def published(content: Mapping[str, Any]) -> list[Table]:
    """MiB by model and kind of step."""
    (results,) = content["results"]
    heads = ["model"]
    for column in COLUMNS:
        heads += [f"{column}: a step", "process"]
    rows = [
        [name, *(f"{row[c][key] / 2**20:.0f}" for c in COLUMNS for key in ("step", "process"))]
        for name, row in results.items()
    ]
    return [harness.table(heads, rows, "memory of training steps, MiB")]


if __name__ == "__main__":
    raise SystemExit(main())
