"""What handing over a block costs, in small operators: the figure behind `graph.fragments`.

    python benchmarks/fragments.py

A function of alternating groups, `size` operators for the backend and one that is kept in eager, is
timed with few and with many groups; the slope is the cost of a group. Compiled and eager are timed
in turns; the medians are printed. Where a group costs the same in both, a block is worth its price.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import dynamo_backends
import harness

FEW, MANY = 2, 10


def groups(count: int, size: int) -> Callable[[Tensor], Tensor]:
    """A function of `count` groups of `size` cheap operators, each followed by an erf."""

    def fn(x: Tensor) -> Tensor:
        for _ in range(count):
            for i in range(size):
                x = x * 1.01 if i % 2 else x + 0.5
            x = torch.erf(x)
        return x

    return fn


def medians(functions: list[Callable[[Tensor], Tensor]], x: Tensor, rounds: int) -> list[float]:
    """Microseconds per call of each function, called in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for fn in functions:
        for _ in range(10):
            fn(x)
    for _ in range(rounds):
        for fn, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            fn(x)
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) * 1e6 for taken in times]


def measure(size: int, elements: int, rounds: int) -> tuple[float, float]:
    """Microseconds per group, in eager and compiled."""
    compiler = dynamo_backends.compiler(
        "openxla", keep_in_eager=("erf",), fragmented="keep", min_block_size=1
    )
    functions = []
    for count in (FEW, MANY):
        fn = groups(count, size)
        functions += [fn, torch.compile(fn, backend=compiler)]
    torch._dynamo.reset()
    few, few_compiled, many, many_compiled = medians(functions, torch.rand(elements), rounds)
    return (many - few) / (MANY - FEW), (many_compiled - few_compiled) / (MANY - FEW)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    settings = parse(arguments)
    console = harness.announce()
    rows = []
    with torch.no_grad():
        for elements in settings.elements:
            for size in settings.sizes:
                eager, compiled = measure(size, elements, settings.rounds)
                rows.append(
                    {"elements": elements, "size": size, "eager_us": eager, "compiled_us": compiled}
                )
    console.print(table(rows))
    if settings.json:
        harness.save_json(settings.json, "fragments", rows, settings=vars(settings))
    return 0


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The results for people."""
    found = Table(title="one block and one operator in eager, µs")
    for column in ("elements", "operators in the block", "eager", "compiled"):
        found.add_column(column, justify="right")
    for r in rows:
        times = f"{r['eager_us']:.1f}", f"{r['compiled_us']:.1f}"
        found.add_row(str(r["elements"]), str(r["size"]), *times)
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"])]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300, help="calls of each function")
    parser.add_argument("--elements", type=int, nargs="+", default=[64, 16 * 1024, 256 * 1024])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 3, 8, 16])
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
