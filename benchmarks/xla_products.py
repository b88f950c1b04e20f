"""Matrix products of transformers, alone: GFLOP/s of eager and of backends, in the same rounds.

    python benchmarks/xla_products.py
    python benchmarks/on_avx2.py benchmarks/xla_products.py --backend openxla --json products.json

Linear layers on 512 rows, and attention of sequences of 128 to 1024 with 12 heads: its products by
themselves, and whole; of a causal one all scores are counted. What a model gains is more than this
says where a backend computes what is around the products together with them, and less where that
has to wait.
"""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from rich.table import Table
from torch import Tensor

import harness

Product = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], int]
"""A function, the shapes of its arguments, and its floating-point operations."""

ROWS, BATCH, HEADS, LENGTH, SIZE = 512, 4, 12, 128, 64
_SCORES = 2 * BATCH * HEADS * LENGTH * LENGTH * SIZE
_HEADS = (BATCH, HEADS, LENGTH, SIZE)
_WEIGHTS = (BATCH, HEADS, LENGTH, LENGTH)


def _linear(size: int, features: int) -> Product:
    shapes = (ROWS, size), (size, features)
    return lambda x, y: x @ y, shapes, 2 * ROWS * size * features


def _attention(batch: int, length: int, causal: bool = False) -> Product:
    shapes = ((batch, HEADS, length, SIZE),) * 3
    function = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
    return function, shapes, 4 * batch * HEADS * length * length * SIZE


PRODUCTS: dict[str, Product] = {
    "512 x 768 by 768 x 768": _linear(768, 768),
    "512 x 768 by 768 x 3072": _linear(768, 3072),
    "512 x 3072 by 3072 x 768": _linear(3072, 768),
    "48 of 128 x 64 by 64 x 128": (lambda q, k: q @ k.mT, (_HEADS, _HEADS), _SCORES),
    "48 of 128 x 128 by 128 x 64": (lambda p, v: p @ v, (_WEIGHTS, _HEADS), _SCORES),
    "attention, 24 heads of 128 x 64": _attention(2, 128),
    "attention, 48 heads of 128 x 64": _attention(4, 128),
    "attention, 24 heads of 512 x 64": _attention(2, 512),
    "attention, 12 heads of 1024 x 64": _attention(1, 1024),
    "causal attention, 48 heads of 128 x 64": _attention(4, 128, causal=True),
    "causal attention, 24 heads of 512 x 64": _attention(2, 512, causal=True),
    "causal attention, 12 heads of 1024 x 64": _attention(1, 1024, causal=True),
}
"""By name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    settings = parse(arguments)
    console = harness.announce()
    backends = settings.backend or ["openxla"]
    records = [
        measure(name, backends, settings.rounds)
        for name in track(PRODUCTS, "measuring", console=console, transient=True)
    ]
    content = {"results": records}
    for each in published(content):
        console.print(each)
    if settings.json:
        harness.save_json(settings.json, "products", records)
    return 0


def measure(name: str, backends: Sequence[str], rounds: int) -> dict[str, Any]:
    """A row: GFLOP/s of eager and of each backend."""
    function, shapes, operations = PRODUCTS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    calls: dict[str, Callable[..., Any]] = {"eager": function}
    torch.compiler.reset()
    for backend in backends:
        calls[backend] = torch.compile(function, backend=backend)
    with torch.no_grad():
        timings = harness.compare(
            {who: functools.partial(call, *inputs) for who, call in calls.items()},
            rounds=rounds,
            repeat=20,  # as in a model, where nobody pauses before each
        )
    speed = {who: operations / timing.median / 1e9 for who, timing in timings.items()}
    return {"product": name, "gflops": speed}


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    rows = content["results"]
    columns = list(rows[0]["gflops"])
    found = Table("GFLOP/s", *(c if c == "eager" else f"`{c}`" for c in columns))
    for row in rows:
        found.add_row(row["product"], *(f"{row['gflops'][c]:.0f}" for c in columns))
    return [found]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="repeatable; default: openxla"
    )
    parser.add_argument("--rounds", type=int, default=20, help="samples of each")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
