"""What calls take while something is compiled beside them, and how long that takes.

    python benchmarks/while_compiling.py
    python benchmarks/while_compiling.py --backends onnxrt --pauses 0 --layers 2

An encoder of MiniLM's architecture with dynamic sizes is called
with one size after the other under `while_compiling="eager"`, with or without a pause between the
calls, until a program serves the size. Calls that Dynamo captures, and those in which a program is
compared with eager, are left out. Calls in eager before and after, with the same pauses, are what
the others are compared with; the limit for a call is 1.3 times their 95th percentile and 5 ms.
Calls in eager beyond the limit are counted, too. Each row is a process of its own with empty cache
folders.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.progress import track
from rich.table import Table

import dynamo_backends
import harness
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.pipeline import background
from harness.calls import encoder, milliseconds, seconds, texts

BACKENDS = ("openxla", "onnxrt", "ov", "inductor_freezing")
SIZES = ((4, 64), (3, 48), (5, 32))
ALONE = 100  # calls in eager before and after, for each size


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if something could not be measured."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--pauses", nargs="+", type=float, default=[0, 20], help="in ms")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each size")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    rows = [(backend, pause) for backend in settings.backends for pause in settings.pauses]
    records = []
    for backend, pause in track(rows, "calling", console=console, transient=True):
        case = backend, pause / 1e3, settings.layers, settings.timeout
        found = harness.result_apart(measured, *case, timeout_s=3 * settings.timeout + 300)
        records.append({"backend": backend, "pause_ms": pause, **found})
    harness.report(published, settings, "while compiling", records, console)
    return int(any("error" in record for record in records))


@torch.no_grad()
def measured(backend: str, pause_s: float, layers: int, limit_s: float) -> dict[str, Any]:
    """Calls with all sizes, one after the other: the times."""
    model = encoder(layers)
    options: dict[str, Any] = {"while_compiling": "eager"}
    compiled = torch.compile(model, backend=backend, dynamic=True, options=options)
    alone, during, served, over, alone_over = [], [], [], 0, 0
    with dynamo_backends.record() as reports:
        for sizes in SIZES:
            inputs = texts(*sizes)
            run, plain = (functools.partial(f, **inputs) for f in (compiled, model))
            eager = in_eager(plain, pause_s)
            start = time.perf_counter()
            times = until_served(run, pause_s, limit_s, reports)
            served.append(time.perf_counter() - start)
            eager += in_eager(plain, pause_s)
            limit = 1.3 * float(np.percentile(eager, 95)) + 5e-3
            over += sum(t > limit for t in times)
            alone_over += sum(t > limit for t in eager)
            alone += eager
            during += times
    if not sum(report.ops_on_backend for report in reports):
        raise SystemExit(f"{backend} serves nothing: {[r.fallbacks for r in reports]}")
    return {
        "alone_ms": milliseconds(alone, 50, 95),
        "during_ms": milliseconds(during, 50, 95, 100),
        "calls": len(during),
        "over": over,
        "alone_calls": len(alone),
        "alone_over": alone_over,
        "served_s": served,
    }


def until_served(
    run: Callable[[], Any], pause_s: float, limit_s: float, reports: Sequence[GraphReport]
) -> list[float]:
    """Seconds of the calls after the first, until nothing is being compiled any more."""
    run()
    times: list[float] = []
    start = time.perf_counter()
    while not background.wait_until_idle(0) and time.perf_counter() - start < limit_s:
        compared = sum(report.verified for report in reports)
        took = seconds(run, pause_s)
        if sum(report.verified for report in reports) == compared:
            times.append(took)
    run()
    return times


def in_eager(run: Callable[[], Any], pause_s: float) -> list[float]:
    """Seconds of calls without anything beside them."""
    return [seconds(run, pause_s) for _ in range(ALONE)][5:]


def published(content: Mapping[str, Any]) -> list[Table]:
    """A line for each backend and pause."""
    heads = (
        "backend", "pause ms", "eager p50, p95 ms", "while compiling p50, p95, max", "calls",
        "÷ eager p50", "÷ p95", "over the limit", "eager's", "s until served",
    )  # fmt: skip
    return [harness.table(heads, map(describe, content["results"]))]


def describe(record: Mapping[str, Any]) -> list[str]:
    """The cells of a row."""
    case = [record["backend"], f"{record['pause_ms']:g}"]
    if "error" in record:
        return [*case, record["error"]]
    alone, during = record["alone_ms"], record["during_ms"]
    return [
        *case, *(", ".join(f"{ms:.1f}" for ms in times) for times in (alone, during)),
        str(record["calls"]), f"{during[0] / alone[0]:.2f}", f"{during[1] / alone[1]:.2f}",
        str(record["over"]), f"{record['alone_over']} of {record['alone_calls']}",
        ", ".join(f"{s:.1f}" for s in record["served_s"]),
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
