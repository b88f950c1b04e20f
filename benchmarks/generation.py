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
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

import harness
from dynamo_backends.bench import results_files
from dynamo_backends.bench.suites.generators import ARCHITECTURES
from harness import decoding

BACKENDS = ("inductor", "openxla", "onnxrt", "ov", "inductor_freezing")
COLUMNS = ("eager", *BACKENDS, "openxla" + decoding.COPYING)
SCALES: dict[str, dict[str, Any]] = {
    "bench": {"tokens": 128, "small": (2, 64), "large": (8, 512), "lengths": (0, 6400)},
    "test": {"tokens": 8, "small": (1, 32), "large": (1, 64), "lengths": (0, 256)},
}
KIND = "generation"

Row = dict[str, Any]
Cell = tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if tokens were wrong or something was compiled too late."""
    settings = parse(arguments)
    if settings.child:
        return child(**json.loads(settings.child))
    console = harness.announce()
    try:
        rows = kept_rows(settings)
    except results_files.ResultError as error:
        console.print(f"[red]{error}[/]")
        return 2
    todo = [cell for cell in cells(settings) if cell not in rows]
    for cell in track(todo, console=console, transient=True):
        rows[cell] = in_a_process(settings, cell)
        save(settings, rows)
    found = [rows[cell] for cell in cells(settings)]
    for table in (cells_table(found), speed_table(found)):
        if table.row_count:
            console.print(table)
    return int(any("error" in r or r.get("wrong") or r.get("late") for r in found))


def cells(settings: argparse.Namespace) -> list[Cell]:
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
    return [cell for cell in (*tokens, *speed) if cell[0] in settings.parts]


def context(settings: argparse.Namespace) -> dict[str, Any]:
    """What results depend on."""
    facts = harness.environment() | {k: getattr(settings, k) for k in ("scale", "rounds")}
    facts["tokens"] = tokens_of(settings)
    return dict(json.loads(json.dumps(facts)))


def tokens_of(settings: argparse.Namespace) -> int:
    """How many are generated."""
    return int(settings.tokens or SCALES[settings.scale]["tokens"])


def kept_rows(settings: argparse.Namespace) -> dict[Cell, Row]:
    """What the file of results has; what failed is measured again.

    Raises:
        ResultError: It is no such file, or of another machine, version or way of measuring.
    """
    path = Path(settings.json) if settings.json else None
    if path is None or not path.exists():
        return {}
    content = results_files.read(path, KIND)
    try:
        before = content["context"]
        found = {tuple(r["cell"]): r for r in content["results"] if "error" not in r}
    except (ValueError, KeyError, TypeError) as error:
        raise results_files.damaged(path, KIND, error) from error
    results_files.check_context(path, before, context(settings))
    return found


def save(settings: argparse.Namespace, rows: Mapping[Cell, Row]) -> None:
    """Writes what there is, if a file was named."""
    if settings.json:
        records = list(rows.values())
        harness.save_json(settings.json, KIND, records, context=context(settings))


def in_a_process(settings: argparse.Namespace, cell: Cell) -> Row:
    """One cell in a fresh process with fresh cache folders."""
    given = {
        "cell": cell, "scale": settings.scale, "tokens": tokens_of(settings),
        "rounds": settings.rounds,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "DYNAMO_BACKENDS_CACHE": f"{folder}/dynamo_backends",
        }
        command = [__file__, "--child", json.dumps(given)]
        found = harness.result_of_child(command, caches, timeout_s=settings.timeout)
    return {"cell": list(cell), **found}


def child(cell: Sequence[str], scale: str, tokens: int, rounds: int) -> int:
    """Measures one cell and hands it back."""
    part, model, cache, column = cell
    if part == "tokens":
        size = SCALES[scale]["small"]
        found = decoding.check_and_time(model, column, cache, size, tokens, rounds)
    else:
        size, length = SCALES[scale]["large"], int(cache) or 32 + tokens
        found = decoding.speed(column, size, tokens, rounds, length)
    harness.hand_back(**found)
    return 0


def cells_table(rows: Sequence[Row]) -> Table:
    """The first part for people."""
    table = Table(
        "model", "cache", "backend", "wrong", "compiled late", "ops in eager", "eager", "tokens/s",
        "× eager", "× inductor",
    )  # fmt: skip
    rows = [r for r in rows if r["cell"][0] == "tokens"]
    inductor = {tuple(r["cell"][1:3]): r for r in rows if r["cell"][3] == "inductor"}
    for r in rows:
        _, model, cache, backend = r["cell"]
        if "error" in r:
            table.add_row(model, cache, backend, r["error"])
            continue
        other = inductor.get((model, cache), {}).get("compiled")
        table.add_row(
            model, cache, backend, str(r["wrong"]), str(r["late"]), str(r["in_eager"]),
            *_speeds(r, other),
        )  # fmt: skip
    return table


def _speeds(row: Row, other: float | None) -> list[str]:
    if "compiled" not in row:
        return ["-"] * 4
    eager, compiled = row["eager"], row["compiled"]
    beside = f"{compiled / other:.2f}" if other else "-"
    return [f"{eager:.0f}", f"{compiled:.0f}", f"{compiled / eager:.2f}", beside]


def speed_table(rows: Sequence[Row]) -> Table:
    """The second part for people."""
    table = Table(
        "backend", "cache MB", "tokens/s", "step ms", "× inductor", "weights once ms", "step ÷ it",
        "copies a step", "donated MB", "temporary MB",
    )  # fmt: skip
    rows = [r for r in rows if r["cell"][0] == "speed"]
    inductor = {r["cell"][2]: r.get("step_ms") for r in rows if r["cell"][3] == "inductor"}
    for r in rows:
        column = r["cell"][3]
        if "error" in r:
            table.add_row(column, r["error"])
            continue
        other = inductor.get(r["cell"][2])
        table.add_row(
            column, *_numbers(r, "cache_megabytes", "tokens", "step_ms"),
            f"{other / r['step_ms']:.2f}" if other else "-", *_numbers(r, "stream_ms"),
            f"{r['step_ms'] / r['stream_ms']:.2f}",
            *_numbers(r, "copies", "donated_megabytes", "temporary_megabytes"),
        )  # fmt: skip
    return table


def _numbers(row: Row, *names: str) -> list[str]:
    return ["-" if row.get(name) is None else f"{row[name]:.2f}" for name in names]


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results proves right, and its times of the second part."""
    tables = (proven(content["results"]), speed_table(content["results"]))
    return [table for table in tables if table.row_count]


def proven(rows: Sequence[Row]) -> Table:
    """A line for each model and cache, a column for each backend."""
    rows = [r for r in rows if r["cell"][0] == "tokens"]
    backends = list(dict.fromkeys(r["cell"][3] for r in rows))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for r in rows:
        _, model, cache, backend = r["cell"]
        lines.setdefault((model, cache), {})[backend] = verdict(r)
    table = Table("model", "cache", *(f"`{b}`" for b in backends))
    for key, found in lines.items():
        table.add_row(*key, *(found.get(b, "") for b in backends))
    return table


def verdict(row: Row) -> str:
    """What is shown of a cell."""
    if "error" in row:
        return "fails"
    wrong = [f"{row['wrong']} wrong"] * bool(row["wrong"])
    late = [f"{row['late']} compiled late"] * bool(row["late"])
    eager = f" ({row['in_eager']} in eager)" if row["in_eager"] else ""
    return (", ".join([*wrong, *late]) or "right") + eager


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
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
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
