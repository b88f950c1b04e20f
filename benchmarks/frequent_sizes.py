"""What an executable for sizes that come often brings, beside the program for all sizes.

    python benchmarks/frequent_sizes.py
    python benchmarks/frequent_sizes.py --model bert --backend ov --json frequent.json

A model of the classic suite is called with one batch size after the other, long enough that each
is worth an executable (the option `specialize`). Then it, the same without that option and eager
are called in turns, with pauses.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

import dynamo_backends
import harness
from dynamo_backends.bench.statistics import compare
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.shapes import frequent

BATCHES = (4, 8)
OTHERS = (6, 9, 10)
"""Which show that one program serves all sizes."""


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    settings = parse(arguments)
    console = harness.announce()
    cases = {b: harness.find_case("classic", settings.model, batch=b) for b in BATCHES + OTHERS}
    inputs = {batch: case.inputs() for batch, case in cases.items()}
    model = cases[BATCHES[0]].make()
    ways: dict[str, Any] = {"eager": model}
    for name, specialize in (("for all", False), ("specialized", True)):
        options: dict[str, Any] = {"specialize": specialize}
        made = copy.deepcopy(model)
        ways[name] = torch.compile(made, backend=settings.backend, dynamic=True, options=options)
    rows = []
    with dynamo_backends.record() as reports:
        for given in (inputs[batch] for batch in (*BATCHES[:1], *OTHERS)):
            for run in ways.values():
                run(*given)
        for batch in BATCHES:
            calls: dict[str, Callable[[], Any]] = {
                name: partial(run, *inputs[batch]) for name, run in ways.items()
            }
            call_often(calls["specialized"], settings.seconds)
            before = exact_calls(reports)
            timings = {n: t.median for n, t in compare(calls, settings.rounds).items()}
            stays = exact_calls(reports) > before
            rows.append({"batch": batch, "stays": stays, "seconds": timings})
    content = {"settings": vars(settings), "results": rows}
    for each in published(content):
        console.print(each)
    if settings.json:
        harness.save_json(settings.json, "frequent sizes", rows, settings=vars(settings))
    return 0


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """The table of results as `main` saves them: milliseconds."""
    model, backend = (content["settings"][name] for name in ("model", "backend"))
    table = Table("batch", "eager", "for all sizes", "specialized", "stays")
    table.title = f"{model} with {backend}, milliseconds of a call"
    for row in content["results"]:
        numbers = (f"{seconds * 1e3:.1f}" for seconds in row["seconds"].values())
        table.add_row(str(row["batch"]), *numbers, "yes" if row["stays"] else "no")
    return [table]


def call_often(call: Any, seconds: float) -> None:
    """Calls until an executable would pay, and then until it is known which program is faster."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        call()
    background.wait()
    for _ in range(2 * frequent.TURNS + 3):
        call()


def exact_calls(reports: Sequence[Any]) -> int:
    """How many calls executables for some sizes have served."""
    rows = (row for report in reports for row in report.traffic())
    return sum(row.calls for row in rows if row.by == "exact")


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.arguments(__doc__, rounds=15)
    parser.add_argument("--model", default="resnet18", help="of the classic suite")
    parser.add_argument("--backend", default="inductor_freezing")
    parser.add_argument("--seconds", type=float, default=40, help="of calls before it is timed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
