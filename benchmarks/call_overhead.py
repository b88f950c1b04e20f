"""What a call of a compiled graph costs above XLA's own execution, and whether calls leak memory.

    python benchmarks/call_overhead.py

The model has 200 small parameters (100 linear layers), one input and one output. "graph" is the
call of the compiled graph as AOT Autograd makes it; Dynamo's guards on 200 parameters and AOT
Autograd's wrapper come on top of it and are shown apart. The exit status is 1 if the process grows
by more than a MiB in 1000 calls.
"""

import argparse
import gc
import time
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import nn

import dynamo_backends
import harness

FEATURES = 16
GROWTH_KIB = 1024  # what counts as flat

COLUMNS = {
    "eager": "eager_us",
    "torch.compile": "compiled_us",
    "graph": "graph_us",
    "XLA alone": "alone_us",
    "graph - XLA": "overhead_us",
    "Dynamo + AOT": "guards_us",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if memory leaks."""
    parser = harness.arguments(__doc__, rounds=30)
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--layers", type=int, default=100, help="two parameters each")
    parser.add_argument("--repeat", type=int, default=100, help="calls per sample")
    parser.add_argument("--calls", type=int, default=1000, help="calls of the memory test")
    parser.add_argument("--cpu", action="store_true", help="the calling thread's CPU time")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    records = []
    for name, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with mode(), console.status(f"measuring under {name}"):
            records.append({"mode": name, **measure(settings)})
    harness.report(published, settings, "call overhead", records, console)
    return int(any(r["growth_kb"] > GROWTH_KIB for r in records))


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Times of calls in microseconds, and how much memory many of them take."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, FEATURES) for _ in range(settings.layers)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, FEATURES)
    compiled = harness.compile_model(model, (x,), settings.backend, fullgraph=True)
    runs: dict[str, Callable[[], Any]] = {
        "compiled": lambda: compiled.function(x),
        "eager": lambda: model(x),
    }
    if compiled.reports:
        runs["graph"], runs["alone"] = graph_alone(compiled.reports[0], runs["compiled"])
    timings = harness.time_candidates(
        runs,
        settings.rounds,
        repeat=settings.repeat,
        lead_in=20,
        warmup=100,
        baseline="eager",
        clock=time.thread_time if settings.cpu else time.perf_counter,
    )
    microseconds = {name: timing.median * 1e6 for name, timing in timings.items()}
    alone = microseconds.get("alone")
    return {
        "compiled_us": microseconds["compiled"],
        "eager_us": microseconds["eager"],
        "alone_us": alone,
        "graph_us": microseconds.get("graph"),
        "overhead_us": microseconds["graph"] - alone if alone is not None else None,
        "guards_us": microseconds["compiled"] - microseconds["graph"] if alone else None,
        "growth_kb": memory_growth(runs["compiled"], settings.calls) / 1024,
    }


def graph_alone(
    report: dynamo_backends.GraphReport, call: Callable[[], Any]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The compiled graph without Dynamo and AOT Autograd around it, and XLA's execution alone.

    Args:
        report: Of the compiled graph; it must be one block and have static shapes.
        call: A call of the compiled model, watched once for the graph's arguments.

    Returns:
        Two functions: one calls the graph as AOT Autograd does, the other only executes XLA's
        program on buffers that were imported beforehand.
    """
    graph = report.executable
    program, arguments = graph.static_program, []

    def watch(given: list[Any]) -> Any:
        arguments.extend(given)
        return program(given)

    with unittest.mock.patch.object(graph, "_static", watch):
        call()
    (block,) = program.blocks
    weights, activations = block.split(arguments)
    return lambda: graph(list(arguments)), block.executable.bind_for_benchmark(weights, activations)


def memory_growth(call: Callable[[], Any], calls: int) -> int:
    """By how many bytes the process grows over many calls, after as many to warm up."""
    sizes = []
    for _ in range(2):
        for _ in range(calls):
            call()
        gc.collect()
        sizes.append(harness.rss_bytes())
    return sizes[1] - sizes[0]


def published(content: Mapping[str, Any]) -> list[Table]:
    """A line for each mode of gradients."""
    settings = content["settings"]
    clock = "µs of CPU time" if settings["cpu"] else "µs"
    title = f"{settings['backend']}: {2 * settings['layers']} parameters, {clock} per call"
    rows = [
        [r["mode"], *("-" if r[key] is None else f"{r[key]:.1f}" for key in COLUMNS.values()),
         f"{r['growth_kb']:+.0f} KiB"]
        for r in content["results"]
    ]  # fmt: skip
    heads = "", *COLUMNS, f"memory after {settings['calls']} more calls"
    return [harness.table(heads, rows, title)]


if __name__ == "__main__":
    raise SystemExit(main())
