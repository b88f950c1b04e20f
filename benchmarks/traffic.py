"""Streams of requests of changing sizes: seconds from cold, latencies once warm, wrong results.

    python benchmarks/traffic.py
    python benchmarks/traffic.py --streams embeddings --columns inductor onnxrt --requests 100
    python benchmarks/traffic.py --streams embeddings --requests 300 --different 20

Each column of each stream is a process of its own with empty cache folders. It answers the stream
from cold; again, which is not counted, until nothing is compiled any more beside the calls;
then once with each request in eager as well, one after the other, which are the times that are
compared; and once to compare results with eager's and, where that leaves doubt, with float64's.
Before each call that is timed there is a pause, in which torch's threads stop spinning.
"made" are executables, and "MiB" is by how much the process grows in the first of
the three. "inductor-dynamic" is `torch.compile(dynamic=True)`, "inductor" is its default.
A column COLUMN@exact compiles every size for itself (the option `ranges=False`). With `--exact`
each of this package's columns is compared with that in its own process, one call after the other.
With `--different` the first requests alone come again and again, in other orders.
"""

import copy
import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import dynamo_backends
import harness
from dynamo_backends.bench.statistics import PAUSE_S
from dynamo_backends.bench.streaming import Serve, difference, percentile, seconds
from dynamo_backends.bench.suites.streams import STREAMS, Stream
from dynamo_backends.pipeline import background

COLUMNS = ("inductor", "inductor-dynamic", "onnxrt", "ov", "inductor_freezing", "openxla")
OTHERS = ("eager", "inductor", "inductor-dynamic")
"""Columns without a backend of this package."""

EXACT = "@exact"

ROUNDS = 6
"""So often is a stream answered, at most, before calls are timed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a result was wrong."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--streams", nargs="+", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), metavar="COLUMN")
    parser.add_argument("--requests", type=int, help="so many, instead of each stream's own number")
    parser.add_argument("--different", type=int, help="only so many of them, which come again")
    parser.add_argument("--exact", action="store_true", help="see above")
    parser.add_argument("--scale", choices=("test", "bench"), default="bench")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for one column")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    rows: list[dict[str, Any]] = []
    every = [(name, column) for name in settings.streams for column in settings.columns]
    for name, column in track(every, "answering", console=console, transient=True):
        exact = settings.exact and column not in OTHERS and EXACT not in column
        how = settings.scale, settings.requests, settings.different, exact
        found = harness.result_apart(measured, name, column, *how, timeout_s=settings.timeout)
        rows.append({"stream": name, "column": column, **found})
    harness.report(published, settings, "traffic", rows, console)
    return int(any(row.get("wrong") for row in rows))


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """The table of each stream, a line for each column, and what the stream is."""
    exact = ["× exact"] if content["settings"]["exact"] else []
    heads = (
        "column", "cold s", "slowest", "÷ inductor", "made", "p50 ms", "p95", "p99", "× eager",
        "eager p95", *exact, "MiB", "wrong",
    )  # fmt: skip
    streams: dict[str, list[dict[str, Any]]] = {}
    for row in content["results"]:
        streams.setdefault(row["stream"], []).append(row)
    parts: list[Table | str] = []
    for name, rows in streams.items():
        cold = next((row.get("cold_s") for row in rows if row["column"] == "inductor"), None)
        lines = [describe(row, cold, bool(exact)) for row in rows]
        parts += [harness.table(heads, lines), f"{name}: {rows[0].get('summary', '')}"]
    return parts


def describe(row: Mapping[str, Any], cold_of_inductor: float | None, exact: bool) -> list[str]:
    """The cells of one column's row."""
    if "error" in row:
        return [row["column"], row["error"]]
    part = f"{row['cold_s'] / cold_of_inductor:.2f}" if cold_of_inductor else "?"
    numbers = row["p50_ms"], row["p95_ms"], row["p99_ms"]
    times_exact = row["times_exact"]
    over_exact = [f"{times_exact:.2f}" if times_exact else ""] if exact else []
    made = str(row["executables"]) if row["executables"] is not None else "?"
    return [
        row["column"], f"{row['cold_s']:.1f}", f"{row['slowest_s']:.2f}", part, made,
        *(f"{n:.1f}" for n in numbers), f"{row['times_eager']:.2f}", f"{row['eager_p95_ms']:.1f}",
        *over_exact, f"{row['growth'] / 2**20:.0f}", str(row["wrong"]),
    ]  # fmt: skip


def measured(
    name: str, column: str, scale: Any, count: int | None, different: int | None, exact: bool
) -> dict[str, Any]:
    """Answers one stream by one column: the times."""
    stream = STREAMS[name](scale, **({"count": count} if count else {}))
    if different:
        requests = repeated(stream.requests, different)
        text = f"{stream.summary}; {different} of them, again and again"
        stream = dataclasses.replace(stream, requests=requests, summary=text)
    eager = stream.serve(copy.deepcopy(stream.model), lambda function: function)
    before = harness.rss_bytes()
    with dynamo_backends.record() as reports, torch.set_grad_enabled(stream.trains):
        served = stream.serve(stream.model, lambda function: compiled(function, column))
        cold = [seconds(served, request) for request in stream.requests]
        growth = harness.peak_rss_bytes() - before
        settle(served, stream.requests, reports)
        made = sum(report.executables for report in reports)
        ways = {"eager": eager, "warm": served}
        if exact:
            ways["exact"] = served_exactly(stream, column)
        took = timed(ways, stream.requests)
        warm, plain = took["warm"], took["eager"]
        wrong = sum(bool(difference(stream, eager, served, r)) for r in stream.requests)
    return {
        "summary": stream.summary,
        "cold_s": sum(cold),
        "slowest_s": max(cold),
        "executables": made if reports else None,
        "in_eager": sum(r.ops_in_eager for r in reports),
        **{f"p{p}_ms": percentile(warm, p) * 1e3 for p in (50, 95, 99)},
        **{f"eager_p{p}_ms": percentile(plain, p) * 1e3 for p in (50, 95, 99)},
        "times_eager": sum(plain) / sum(warm),
        "times_exact": sum(took["exact"]) / sum(warm) if exact else None,
        "warm_s": sum(warm),
        "growth": growth,
        "wrong": wrong,
    }


def settle(
    served: Serve, requests: Sequence[Any], reports: Sequence[dynamo_backends.GraphReport]
) -> None:
    """Answers a stream until nothing is compiled for that, and no call compared with eager.

    The first calls of programs are, and programs are made while others serve.
    """
    background.wait_until_idle()
    for _ in range(ROUNDS):
        before = sum(report.executables for report in reports)
        for request in requests:
            served(*request)
        background.wait_until_idle()
        if sum(report.executables for report in reports) == before:
            break


def served_exactly(stream: Stream, column: str) -> Serve:
    """What answers the stream with each size compiled by itself, after it has done so once."""
    torch._dynamo.config.recompile_limit *= 4  # it belongs to code, which both ways share
    serve = stream.serve(copy.deepcopy(stream.model), lambda f: compiled(f, column + EXACT))
    for request in stream.requests:
        serve(*request)
    return serve


def timed(ways: Mapping[str, Serve], requests: Sequence[Any]) -> dict[str, list[float]]:
    """Seconds of each request in each way, one after the other, with a pause before each."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for request in requests:
        for name, serve in ways.items():
            time.sleep(PAUSE_S)
            took[name].append(seconds(serve, request))
    return took


def repeated(requests: Sequence[Any], different: int) -> list[Any]:
    """As many requests, of which only the first ones differ; each round in an order of its own."""
    order = random.Random(0)
    first = list(requests[:different])
    rounds = range(-(-len(requests) // len(first)))
    return [x for _ in rounds for x in order.sample(first, len(first))][: len(requests)]


def compiled(function: Callable[..., Any], column: str) -> Callable[..., Any]:
    """A function compiled as a column says."""
    if column in OTHERS:
        if column == "eager":
            return function
        return torch.compile(function, dynamic=True if column == "inductor-dynamic" else None)
    name, exact, _ = column.partition(EXACT)
    options: dict[str, Any] = {"ranges": False, "max_executables": 1024} if exact else {}
    return torch.compile(function, backend=name, options=options)


if __name__ == "__main__":
    raise SystemExit(main())
