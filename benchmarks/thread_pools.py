"""Whether a backend's threads leave the processor to torch after a graph ran.

    python benchmarks/thread_pools.py
    python benchmarks/thread_pools.py --backend onnxrt --backend openxla --limit 0.95

A matrix product of torch is timed alone and directly after a call of a compiled graph, interleaved,
and, to tell causes apart, after the same network in eager and after a pause as long as the graph's
run. The ratio is the median alone over the median after: 1 means that the graph's threads are out
of the way. Less means that they still spin, or what eager and the pause show too: that the
network's data took the place of the product's in caches, and that torch's own threads fell asleep.
The last column is the ratio to the product after a pause: what the graph itself costs.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import harness

KINDS = {
    "alone": "alone",
    "pause": "after a pause",
    "eager": "after eager",
    "after": "after a graph",
}
"""What comes before the product, as the table says it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a limit was given and a ratio is below it."""
    settings = parse(arguments)
    console = harness.announce()
    records = []
    for backend in settings.backend or ["onnxrt"]:
        with torch.no_grad():
            records.append({"backend": backend, **measure(backend, settings)})
        torch.compiler.reset()
    console.print(table(records))
    if settings.json:
        harness.save_json(settings.json, "thread pools", records, settings=vars(settings))
    return 1 if any(r["ratio"] < (settings.limit or 0) for r in records) else 0


def measure(backend: str, settings: argparse.Namespace) -> dict[str, float]:
    """Medians of a matrix product in milliseconds, of each kind, and their ratios."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).eval()
    x = torch.randn(256, 512)
    function = harness.compile_model(model, (x,), backend, fullgraph=True).function
    a, b = torch.randn(2, settings.size, settings.size)
    pause = statistics.median(timed(function, x) for _ in range(20))
    before: dict[str, Callable[[], object]] = {
        "alone": lambda: None,
        "pause": lambda: time.sleep(pause),
        "eager": lambda: model(x),
        "after": lambda: function(x),
    }
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order = random.Random(0)
    for _ in track(range(settings.rounds), backend, transient=True):
        for kind in order.sample(list(samples), len(samples)):
            time.sleep(0.02)
            torch.mm(a, b)  # wakes torch's own threads
            before[kind]()
            samples[kind].append(timed(torch.mm, a, b))
    medians = {kind: statistics.median(samples[kind]) * 1e3 for kind in KINDS}
    return {
        **{f"{kind}_ms": milliseconds for kind, milliseconds in medians.items()},
        "ratio": medians["alone"] / medians["after"],
        "ratio_to_pause": medians["pause"] / medians["after"],
    }


def timed(call: Callable[..., object], *arguments: Tensor) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The results for people."""
    columns = [f"{text} ms" for text in KINDS.values()]
    found = Table("backend", *columns, "alone / after", "pause / after")
    for r in records:
        times = [f"{r[f'{kind}_ms']:.3f}" for kind in KINDS]
        found.add_row(r["backend"], *times, f"{r['ratio']:.3f}", f"{r['ratio_to_pause']:.3f}")
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"])]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.arguments(__doc__, rounds=100)
    parser.add_argument("--backend", action="append", metavar="NAME", help="repeatable")
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the matrices")
    parser.add_argument("--limit", type=float, metavar="RATIO", help="smallest ratio that passes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
