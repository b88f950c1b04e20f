"""Lazy Tensor Core with the program kept (`ltc`) against recording it at every call (`ltc_trace`).

    python benchmarks/lazy.py
    python benchmarks/lazy.py --models resnet18 bert --scale test

Both and eager are timed interleaved; a ratio is `ltc_trace`'s median over that of `ltc`.
"""

import gc
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import harness
from dynamo_backends.bench.suites.case import call


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a model's results are wrong."""
    settings = parse(arguments)
    console = harness.announce()
    cases = harness.chosen_cases(settings, console)
    if not cases:
        return 2
    records = []
    for case in track(cases, "measuring", console=console, transient=True):
        with torch.no_grad():
            records.append(measure(case, settings.rounds))
        torch.compiler.reset()
        gc.collect()
    console.print(table(records))
    if settings.json:
        harness.save_json(settings.json, "lazy", records, settings=vars(settings))
    return 0 if all(r["right"] for r in records) else 1


def measure(case: harness.ModelCase, rounds: int) -> dict[str, Any]:
    """Medians in milliseconds of one model, and the ratio."""
    model, inputs = case.make(), case.inputs()
    compiled = {
        name: harness.compile_model(model, inputs, name, fullgraph=True)
        for name in ("ltc", "ltc_trace")
    }
    right = all(harness.check(model, c.function, inputs).passed for c in compiled.values())
    functions = {n: lambda c=c: call(c.function, inputs) for n, c in compiled.items()}
    timings = harness.compare({"eager": lambda: call(model, inputs), **functions}, rounds)
    times = {f"{name}_ms": t.median * 1e3 for name, t in timings.items()}
    return {
        "model": case.name,
        **times,
        "ratio": times["ltc_trace_ms"] / times["ltc_ms"],
        "ops_in_eager": compiled["ltc"].ops_in_eager,
        "right": right,
    }


def table(records: Sequence[dict[str, Any]]) -> Table:
    """The results for people."""
    shown = Table(title="Lazy Tensor Core: recorded once against recorded at every call")
    names = ("model", "eager ms", "ltc ms", "ltc_trace ms", "ratio", "in eager", "right")
    for name in names:
        shown.add_column(name, justify="left" if name == "model" else "right")
    for r in records:
        times = [f"{r[f'{n}_ms']:.3f}" for n in ("eager", "ltc", "ltc_trace")]
        right = "yes" if r["right"] else "no"
        shown.add_row(r["model"], *times, f"{r['ratio']:.2f}", str(r["ops_in_eager"]), right)
    return shown


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=20)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
