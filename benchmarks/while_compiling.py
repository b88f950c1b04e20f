"""What calls take while something is compiled beside them, and how long that takes.

    python benchmarks/while_compiling.py
    python benchmarks/while_compiling.py --backends onnxrt --pauses 0 --layers 2

An encoder of MiniLM's architecture (384 features, weights not trained) with dynamic sizes is called
with one size after the other under `while_compiling="eager"`, with or without a pause between the
calls, until a program serves the size. Calls that Dynamo captures, and those in which a program is
compared with eager, are left out. Calls in eager before and after, with the same pauses, are what
the others are compared with; the limit for a call is 1.3 times their 95th percentile and 5 ms.
Calls in eager beyond the limit are counted, too. Each row is a process of its own with empty cache
folders.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.progress import track
from rich.table import Table

import dynamo_backends
import harness
from dynamo_backends.bench.torchvision_shim import import_transformers
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.pipeline import background

BACKENDS = ("openxla", "onnxrt", "ov", "inductor_freezing")
SIZES = ((4, 64), (3, 48), (5, 32))
ALONE = 100  # calls in eager before and after, for each size


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if something could not be measured."""
    settings = parse(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    rows = [(backend, pause) for backend in settings.backends for pause in settings.pauses]
    records = []
    for backend, pause in track(rows, "calling", console=console, transient=True):
        measured = in_a_process(settings, backend, pause)
        records.append({"backend": backend, "pause_ms": pause, **measured})
    for each in published({"results": records}):
        console.print(each)
    if settings.json:
        harness.save_json(settings.json, "while compiling", records, settings=vars(settings))
    return int(any("error" in record for record in records))


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """The table of results as `main` saves them."""
    table = Table(
        "backend", "pause ms", "eager p50, p95 ms", "while compiling p50, p95, max", "calls",
        "÷ eager p50", "÷ p95", "over the limit", "eager's", "s until served",
    )  # fmt: skip
    for record in content["results"]:
        table.add_row(*describe(record))
    return [table]


def in_a_process(settings: argparse.Namespace, backend: str, pause: float) -> dict[str, Any]:
    """Measures in a fresh process with fresh cache folders."""
    command = [__file__, "--child", "--backends", backend, "--pauses", str(pause)]
    command += ["--layers", str(settings.layers), "--timeout", str(settings.timeout)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "DYNAMO_BACKENDS_CACHE": f"{folder}/dynamo_backends",
        }
        return harness.result_of_child(command, caches, timeout_s=3 * settings.timeout + 300)


def describe(record: dict[str, Any]) -> list[str]:
    """The cells of a row."""
    if "error" in record:
        return [record["backend"], f"{record['pause_ms']:g}", record["error"]]
    alone, during = record["alone_ms"], record["during_ms"]
    return [
        record["backend"], f"{record['pause_ms']:g}", f"{alone[0]:.1f}, {alone[1]:.1f}",
        ", ".join(f"{ms:.1f}" for ms in during), str(record["calls"]),
        f"{during[0] / alone[0]:.2f}", f"{during[1] / alone[1]:.2f}", str(record["over"]),
        f"{record['alone_over']} of {record['alone_calls']}",
        ", ".join(f"{s:.1f}" for s in record["served_s"]),
    ]  # fmt: skip


@torch.no_grad()
def child(settings: argparse.Namespace) -> int:
    """Calls with all sizes, one after the other, and hands the times back."""
    model = encoder(settings.layers)
    (backend,), (pause,) = settings.backends, settings.pauses
    options: dict[str, Any] = {"while_compiling": "eager"}
    compiled = torch.compile(model, backend=backend, dynamic=True, options=options)
    alone, during, served, over, alone_over = [], [], [], 0, 0
    with dynamo_backends.record() as reports:
        for sizes in SIZES:
            inputs = {"input_ids": torch.randint(1000, sizes), "attention_mask": torch.ones(sizes)}
            eager = in_eager(model, inputs, pause / 1e3)
            start = time.perf_counter()
            times = until_served(compiled, inputs, pause / 1e3, settings.timeout, reports)
            served.append(time.perf_counter() - start)
            eager += in_eager(model, inputs, pause / 1e3)
            limit = 1.3 * float(np.percentile(eager, 95)) + 5e-3
            over += sum(t > limit for t in times)
            alone_over += sum(t > limit for t in eager)
            alone += eager
            during += times
    if not sum(report.ops_on_backend for report in reports):
        raise SystemExit(f"{backend} serves nothing: {[r.fallbacks for r in reports]}")
    harness.hand_back(
        alone_ms=milliseconds(alone, 50, 95),
        during_ms=milliseconds(during, 50, 95, 100),
        calls=len(during),
        over=over,
        alone_calls=len(alone),
        alone_over=alone_over,
        served_s=served,
    )
    return 0


def encoder(layers: int) -> Any:
    """An encoder of MiniLM's architecture."""
    torch.manual_seed(0)
    transformers = import_transformers()
    config = transformers.BertConfig(
        hidden_size=384, num_attention_heads=12, intermediate_size=1536, num_hidden_layers=layers
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def until_served(
    compiled: Callable[..., Any],
    inputs: dict[str, Any],
    pause_s: float,
    limit_s: float,
    reports: Sequence[GraphReport],
) -> list[float]:
    """Seconds of the calls after the first, until nothing is being compiled any more."""
    compiled(**inputs)
    times: list[float] = []
    start = time.perf_counter()
    while not background.wait(0) and time.perf_counter() - start < limit_s:
        compared = sum(report.verified for report in reports)
        took = seconds(compiled, inputs, pause_s)
        if sum(report.verified for report in reports) == compared:
            times.append(took)
    compiled(**inputs)
    return times


def in_eager(model: Callable[..., Any], inputs: dict[str, Any], pause_s: float) -> list[float]:
    """Seconds of calls without anything beside them."""
    return [seconds(model, inputs, pause_s) for _ in range(ALONE)][5:]


def seconds(function: Callable[..., Any], inputs: dict[str, Any], pause_s: float) -> float:
    """Of one call, after a pause: threads that slept are slower than those that spin."""
    time.sleep(pause_s)
    start = time.perf_counter()
    function(**inputs)
    return time.perf_counter() - start


def milliseconds(times: Sequence[float], *percentiles: int) -> list[float]:
    """Percentiles of seconds."""
    return [float(np.percentile(times or [0.0], p)) * 1e3 for p in percentiles]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--pauses", nargs="+", type=float, default=[0, 20], help="in ms")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each size")
    parser.add_argument("--json", metavar="FILE", help="save the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
