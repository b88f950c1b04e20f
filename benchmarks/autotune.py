"""Autotune and every single candidate against eager: is it right, and as fast as the best of them?

    python benchmarks/autotune.py
    python benchmarks/autotune.py --json results.json --budget 1800   # the next call goes on
    python benchmarks/autotune.py --suite classic --models bert vit_s_16 --backend onnxrt
    python benchmarks/autotune.py --precision bf16
    python benchmarks/autotune.py --precision int8     # MiniLM, ResNet-50 and BERT, on real batches
    python benchmarks/autotune.py --models bert_base    # of real size: 12 layers of 768 features

All are timed interleaved, on ten classic models and ten transformers. A figure is eager's median
time over the backend's. Results are saved after every model, and a call with the same file goes on
where the last one stopped. The exit status is 1 if autotune's result is wrong, if it is below 0.98
times eager, or more than 3% behind the best single candidate.
"""

import argparse
import functools
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

import harness
from dynamo_backends.bench.results_files import ResultError
from harness import int8
from harness.cell_runs import run_cells
from harness.cell_tables import (
    AUTOTUNE,
    AUTOTUNE_OF_BEST,
    cell_text,
    fastest,
    mean_ratio,
    problems,
)
from harness.cells import EAGER, Cell, Measuring, Row, cells
from harness.ledger import Ledger, rows_of

SINGLE = ("inductor", "inductor_freezing", "openxla", "onnxrt", "ov", "ofi")
REDUCED = ("inductor_freezing", "ov", "openxla")  # can be told to compute in bfloat16
OF_EACH_SUITE = 10
LEAST_OF_EAGER = 0.98

Results = Mapping[str, Sequence[Row]]
"""Rows by model."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    settings = parse(arguments)
    console = harness.make_console()
    if settings.precision == "int8":
        return int8.run(settings, settings.backend or int8.SINGLE, console)
    with tempfile.TemporaryDirectory() as folder:
        path = settings.json or Path(folder) / "results.json"
        try:
            todo = choose(settings)
            ledger = Ledger(path, context(settings))
        except (ValueError, ResultError) as error:
            console.print(f"[red]{error}[/]", highlight=False)
            return 2
        console.print(f"[dim]{harness.environment_line()}, device {settings.device}[/]")
        backends = [*(settings.backend or SINGLE), AUTOTUNE]
        try:
            left = run_cells(
                todo, backends, ledger, functools.partial(measuring, settings), console,
                budget_s=settings.budget,
                on_cell=lambda c, rows: console.print(line(c.model, rows), highlight=False),
            )  # fmt: skip
        except (KeyboardInterrupt, SystemExit):
            ledger.interrupt()
            raise
        found = {c.model: ledger.results[c] for c in todo if c in ledger.results}
        console.print(table(found, backends, settings.precision, settings.batch))
        for text in problems(ledger.results):
            console.print(f"[red]{text}[/]", highlight=False)
    if left:
        console.print(
            f"{left} models are left" + "; the same command goes on" * bool(settings.json)
        )
    return 0 if all(passed(rows) for rows in found.values()) else 1


def choose(settings: argparse.Namespace) -> list[Cell]:
    """The models to measure: of the suites, the named ones or ten of each.

    Raises:
        ValueError: A model does not exist.
    """
    suites = [settings.suite] if settings.suite else ["classic", "transformers"]
    if settings.models and not settings.suite:
        suites.append("full_size")
    cases = {name: harness.suite(name, settings.scale, settings.batch) for name in suites}
    if settings.models:
        wanted = {
            c.name
            for c in harness.find_cases(list(itertools.chain(*cases.values())), settings.models)
        }
        models = [(name, c.name) for name, some in cases.items() for c in some if c.name in wanted]
    else:
        models = [(name, c.name) for name, some in cases.items() for c in some[:OF_EACH_SUITE]]
    return list(cells(models, [settings.batch], ["float32"], ["inference"]))


def measuring(settings: argparse.Namespace, backends: Sequence[str]) -> Measuring:
    """How models are measured: autotune chooses among the others."""
    singles = [name for name in backends if name != AUTOTUNE]
    options: dict[str, dict[str, Any]] = {
        AUTOTUNE: {
            "candidates": singles,
            "precision": settings.precision,
            "budget_s": settings.tuning,
        }
    }
    if settings.precision == "bf16":
        options |= {name: {"precision": "bf16"} for name in singles if name in REDUCED}
    autocast = settings.precision == "bf16"
    return Measuring(
        settings.device, settings.scale, settings.rounds, options=options, autocast=autocast
    )


def context(settings: argparse.Namespace) -> dict[str, Any]:
    """What results depend on."""
    return {
        **harness.environment(),
        **{k: getattr(settings, k) for k in ("device", "scale", "rounds", "precision", "tuning")},
        "backends": list(settings.backend or SINGLE),
        "date": time.strftime("%Y-%m-%d"),
    }


def ratio_of(rows: Sequence[Row], backend: str) -> float | None:
    """Speedup over eager; None if the backend failed or is wrong."""
    return next((r.ratio for r in rows if r.backend == backend), None)


def best_single(rows: Sequence[Row]) -> tuple[str, float]:
    """The fastest single candidate and its speedup, eager among them."""
    best = fastest(rows, without=[AUTOTUNE, EAGER])
    return (
        (EAGER, 1.0) if best is None or (best.ratio or 0) < 1 else (best.backend, best.ratio or 1)
    )


def passed(rows: Sequence[Row]) -> bool:
    """Whether autotune is right, no slower than eager, and as fast as the best."""
    ours = ratio_of(rows, AUTOTUNE)
    return ours is not None and ours >= max(LEAST_OF_EAGER, AUTOTUNE_OF_BEST * best_single(rows)[1])


def line(model: str, rows: Sequence[Row]) -> str:
    """What is shown as soon as a model has been measured."""
    shown = ", ".join(f"{r.backend} {cell_text(r)}" for r in rows if r.backend != EAGER)
    return f"[dim]{model}: {shown}[/]"


def table(
    results: Results, backends: Sequence[str], precision: str, batch: int, narrow: bool = True
) -> Table:
    """One line per model, and the geometric means; narrow: heads may be broken in two."""
    title = f"speedup over eager, {precision}, batch {batch}, inference"
    found = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    found.add_column("model")
    for name in ("eager ms", *backends):
        head = name.replace("_", "_\n", 1) if narrow else name
        found.add_column(head, justify="right", no_wrap=True)
    found.add_column("chosen")
    for name in ("of best", "error"):
        found.add_column(name, justify="right")
    for model, rows in results.items():
        of = {row.backend: row for row in rows}
        best, ratio = best_single(rows)
        eager, tuned = of.get(EAGER), of.get(AUTOTUNE)
        ours = tuned.ratio if tuned else None
        cells_of = [cell_text(of.get(n)) for n in backends]
        found.add_row(
            model,
            f"{eager.ms:.1f}" if eager and eager.ms is not None else "-",
            *(f"[bold]{c}[/]" if n == best else c for n, c in zip(backends, cells_of, strict=True)),
            tuned.note if tuned else "",
            "-" if ours is None else f"{ours / ratio:.2f}",
            f"{tuned.max_rel:.0e}" if tuned and tuned.max_rel is not None else "-",
            style=None if passed(rows) else "red",
        )
    found.add_section()
    means = [mean_ratio(results.values(), name) for name in backends]
    shown = ["-" if m is None else f"{m:.2f}" for m in means]
    found.add_row("geometric mean", "", *shown, "", "", "")
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    if content["kind"] == "int8":
        return int8.published(content)
    facts, measured = content["context"], rows_of(content)
    batch = next(iter(measured)).batch
    found = {cell.model: rows for cell, rows in measured.items()}
    backends = [*facts["backends"], AUTOTUNE]
    return [table(found, backends, facts["precision"], batch, narrow=False)]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=20)
    parser.add_argument("--suite", choices=list(harness.SUITES), help="only this suite")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help=f"a single candidate; repeatable; default: {', '.join(SINGLE)}",
    )
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16", "int8"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tuning", type=float, default=600.0, metavar="S",
                        help="seconds that autotune may take for a model")  # fmt: skip
    parser.add_argument(
        "--budget", type=float, metavar="S", help="begin no model that may end later"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
