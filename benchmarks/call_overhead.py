"""What a call of a compiled graph costs above XLA's own execution, and whether calls leak memory.

    python benchmarks/call_overhead.py

The model has 200 small parameters (100 linear layers), one input and one output. "graph" is the
call of the compiled graph as AOT Autograd makes it; Dynamo's guards on 200 parameters and AOT
Autograd's wrapper come on top of it and are shown apart.
"""

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import nn

import dynamo_backends
import harness

FEATURES = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a limit was given and is exceeded."""
    settings = parse(arguments)
    console = harness.announce()
    records = []
    for name, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with mode(), console.status(f"measuring under {name}"):
            records.append({"mode": name, **measure(settings)})
    console.print(table(vars(settings), records))
    if settings.json:
        harness.save_json(settings.json, "call overhead", records, settings=vars(settings))
    overheads = [r["overhead_us"] for r in records if r["overhead_us"] is not None]
    slow = settings.limit is not None and max(overheads, default=0.0) > settings.limit
    leaks = any(r["growth_kb"] > settings.growth_limit for r in records)
    return 1 if slow or leaks else 0


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Times of calls in microseconds, and how much memory many of them take."""
    torch.compiler.reset()
    model = chain(settings.layers)
    x = torch.randn(1, FEATURES)
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
        report: Of the compiled graph; it must be one block.
        call: A call of the compiled model, watched once for the graph's arguments.

    Returns:
        Two functions: one calls the graph as AOT Autograd does, the other only executes XLA's
        program on buffers that were imported beforehand.
    """
    graph, arguments = report.executable, harness.graph_arguments(report, call)
    (block,) = graph.static_program.blocks
    weights, activations = block.split(arguments)
    return lambda: graph(list(arguments)), block.executable.alone(weights, activations)


def memory_growth(call: Callable[[], Any], calls: int) -> int:
    """By how many bytes the process grows over many calls, after as many to warm up."""
    for _ in range(calls):
        call()
    gc.collect()
    before = harness.rss_bytes()
    for _ in range(calls):
        call()
    gc.collect()
    return harness.rss_bytes() - before


def chain(layers: int) -> nn.Module:
    """Linear layers one after another; two parameters each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(layers))).eval()


def table(settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Table:
    """The results for people."""
    clock = "µs of CPU time" if settings["cpu"] else "µs"
    parameters = 2 * settings["layers"]
    shown = Table(title=f"{settings['backend']}: {parameters} parameters, {clock} per call")
    columns = ("eager", "torch.compile", "graph", "XLA alone", "graph - XLA", "Dynamo + AOT")
    for name in ("", *columns):
        shown.add_column(name, justify="right" if name else "left")
    shown.add_column(f"memory after {settings['calls']} more calls", justify="right")
    for r in records:
        keys = ("eager_us", "compiled_us", "graph_us", "alone_us", "overhead_us", "guards_us")
        cells = ["-" if r[key] is None else f"{r[key]:.1f}" for key in keys]
        shown.add_row(r["mode"], *cells, f"{r['growth_kb']:+.0f} KiB")
    return shown


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["settings"], content["results"])]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.arguments(__doc__, rounds=30)
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--layers", type=int, default=100, help="two parameters each")
    parser.add_argument("--repeat", type=int, default=100, help="calls per sample")
    parser.add_argument("--calls", type=int, default=1000, help="calls of the memory test")
    parser.add_argument("--cpu", action="store_true", help="the calling thread's CPU time")
    parser.add_argument("--limit", type=float, metavar="US", help="largest overhead that passes")
    parser.add_argument(
        "--growth-limit", type=float, default=1024, metavar="KIB", help="what counts as flat"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
