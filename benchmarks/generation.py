"""Generation with transformers: the same tokens as eager, what is compiled, tokens per second.

    python benchmarks/generation.py --json generation.json
    python benchmarks/generation.py --models llama t5 --backends openxla --caches static
    python benchmarks/generation.py --parts speed --lengths 0 6400
    python benchmarks/generation.py --scale test --parts tokens --rounds 0

Each cell is a process of its own with empty cache folders. There are two parts:

- "tokens", for each model, cache and backend: in float64 it generates tokens greedily for three
  prompts of different lengths in the same bucket, which have to be eager's; what is compiled for
  the later ones is counted, and which operators run in eager. In float32 it is timed: tokens per
  second of one prompt, eager and compiled one after the other, medians of `--rounds` (0: it is
  not). `ov` leaves float64 to eager and is checked in float32.
- "speed", for each backend and length of the static cache (0: what is needed; 6400: 105 MB): one
  Llama-like model of 35 million parameters. Tokens per second, a single decoding step, and how long
  it takes to read the weights once, by a matrix-vector product of torch's with as many bytes in the
  same process. Copies of the cache are counted: under a dispatch mode, and in XLA's memory
  statistics. `openxla@copying` is not allowed to update the cache in place.

With `--json` each cell is saved when it is done, and the same command goes on where it ended.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

import harness
from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.bench.suites.generators import ARCHITECTURES
from harness import decoding
from harness.kept import Results

BACKENDS = ("inductor", "openxla", "onnxrt", "ov", "inductor_freezing")
COLUMNS = ("eager", *BACKENDS, "openxla" + decoding.COPYING)
SCALES: dict[str, dict[str, Any]] = {
    "bench": {"tokens": 128, "small": (2, 64), "large": (8, 512), "lengths": (0, 6400)},
    "test": {"tokens": 8, "small": (1, 32), "large": (1, 64), "lengths": (0, 256)},
}

Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if tokens were wrong or something was compiled too late."""
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--parts", nargs="+", default=["tokens", "speed"], metavar="PART")
    parser.add_argument("--models", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), metavar="BACKEND")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), metavar="BACKEND")
    parser.add_argument("--caches", nargs="+", default=["static", "default"], metavar="CACHE")
    parser.add_argument("--lengths", nargs="+", type=int, help="of the second part's caches")
    parser.add_argument("--scale", default="bench", choices=list(SCALES), help="model sizes")
    parser.add_argument("--tokens", type=int, help="so many are generated")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one cell")
    settings = parser.parse_args(arguments)
    settings.tokens = settings.tokens or SCALES[settings.scale]["tokens"]
    console = harness.announce()
    try:
        kept = harness.Kept(settings, "generation", ("scale", "rounds", "tokens"))
    except ResultError as error:
        return harness.refused(error, console)
    names = cells(settings)
    kept.measure_left(names, lambda name: in_a_process(settings, name), console)
    found = {name: kept.results[name] for name in names}
    for table in (cells_table(found), speed_table(found)):
        if table.row_count:
            console.print(table)
    rows = found.values()
    return int(any("error" in r or r.get("wrong") or r.get("late") for r in rows))


def cells(settings: argparse.Namespace) -> list[str]:
    """What is measured: part, model, cache and column; of the second part the cache's length."""
    tokens = [
        ("tokens", model, cache, backend)
        for model in settings.models
        for cache in ARCHITECTURES[model].caches
        if cache in settings.caches
        for backend in settings.backends
    ]
    lengths = settings.lengths or SCALES[settings.scale]["lengths"]
    speed = [("speed", "llama", str(n), column) for n in lengths for column in settings.columns]
    return ["/".join(cell) for cell in (*tokens, *speed) if cell[0] in settings.parts]


def in_a_process(settings: argparse.Namespace, name: str) -> Row:
    """One cell in a fresh process with empty caches."""
    how = settings.scale, settings.tokens, settings.rounds
    return harness.result_apart(measured, name, *how, timeout_s=settings.timeout)


def measured(name: str, scale: str, tokens: int, rounds: int) -> Row:
    """One cell."""
    part, model, cache, column = name.split("/")
    if part == "tokens":
        size = SCALES[scale]["small"]
        return decoding.check_and_time(model, column, cache, size, tokens, rounds)
    size, length = SCALES[scale]["large"], int(cache) or 32 + tokens
    return decoding.speed(column, size, tokens, rounds, length)


def rows_of(part: str, results: Results) -> list[tuple[list[str], Row]]:
    """The cells of a part, each with its model, cache and column."""
    named = [(name.split("/"), row) for name, row in results.items()]
    return [(cell, row) for (first, *cell), row in named if first == part]


def cells_table(results: Results) -> Table:
    """The first part for people."""
    lines = []
    for (model, cache, backend), r in rows_of("tokens", results):
        line = [model, cache, backend]
        if "error" in r:
            lines.append([*line, r["error"]])
            continue
        line += [str(r["wrong"]), str(r["late"]), str(r["in_eager"])]
        if "compiled" not in r:
            lines.append([*line, *["-"] * 4])
            continue
        other = results.get(f"tokens/{model}/{cache}/inductor", {}).get("compiled")
        beside = f"{r['compiled'] / other:.2f}" if other else "-"
        speeds = f"{r['eager']:.0f}", f"{r['compiled']:.0f}", f"{r['compiled'] / r['eager']:.2f}"
        lines.append([*line, *speeds, beside])
    heads = (
        "model", "cache", "backend", "wrong", "compiled late", "ops in eager", "eager", "tokens/s",
        "× eager", "× inductor",
    )  # fmt: skip
    return harness.table(heads, lines, left=3)


def speed_table(results: Results) -> Table:
    """The second part for people."""
    lines = []
    for (model, length, column), r in rows_of("speed", results):
        if "error" in r:
            lines.append([column, r["error"]])
            continue
        other = results.get(f"speed/{model}/{length}/inductor", {}).get("step_ms")
        lines.append([
            column, *_numbers(r, "cache_megabytes", "tokens", "step_ms"),
            f"{other / r['step_ms']:.2f}" if other else "-", *_numbers(r, "stream_ms"),
            f"{r['step_ms'] / r['stream_ms']:.2f}",
            *_numbers(r, "copies", "donated_megabytes", "temporary_megabytes"),
        ])  # fmt: skip
    heads = (
        "backend", "cache MB", "tokens/s", "step ms", "× inductor", "weights once ms", "step ÷ it",
        "copies a step", "donated MB", "temporary MB",
    )  # fmt: skip
    return harness.table(heads, lines)


def _numbers(row: Row, *names: str) -> list[str]:
    return ["-" if row.get(name) is None else f"{row[name]:.2f}" for name in names]


def published(content: Mapping[str, Any]) -> list[Table]:
    """What a file of results proves right, and its times of the second part."""
    tables = (proven(content["results"]), speed_table(content["results"]))
    return [table for table in tables if table.row_count]


def proven(results: Results) -> Table:
    """A line for each model and cache, a column for each backend."""
    backends: dict[str, None] = {}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for (model, cache, backend), row in rows_of("tokens", results):
        backends[backend] = None
        lines.setdefault((model, cache), {})[backend] = verdict(row)
    rows = [[*key, *(found.get(b, "") for b in backends)] for key, found in lines.items()]
    return harness.table(("model", "cache", *(f"`{b}`" for b in backends)), rows, left=2)


def verdict(row: Row) -> str:
    """What is shown of a cell."""
    if "error" in row:
        return "fails"
    wrong = [f"{row['wrong']} wrong"] * bool(row["wrong"])
    late = [f"{row['late']} compiled late"] * bool(row["late"])
    eager = f" ({row['in_eager']} in eager)" if row["in_eager"] else ""
    return (", ".join([*wrong, *late]) or "right") + eager


if __name__ == "__main__":
    raise SystemExit(main())
