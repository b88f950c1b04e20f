"""Every usable GPU backend on eleven models: speedup over eager, and whether the results are right.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --budget 540            # stop in time; the next call goes on
    python benchmarks/gpu.py --part 1/4 --json a.json
    python benchmarks/gpu.py --device cpu --scale test --models resnet18 --backend openxla

Models, batch sizes, dtypes and modes make cells; in each cell all backends are compiled, compared
with float64 and timed in the same rounds. Results are saved after every cell, as JSON and as
Markdown, and a call with the same file goes on where the last one stopped, also if the process was
killed; a backend that took it along twice counts as failed. The exit status is 1 if a result is
wrong or, on a GPU, a target is missed; and 2 without a CUDA device.
"""

import argparse
import functools
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import harness
from dynamo_backends._torch_private.control import torch_backends
from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.cli.doctor import look
from dynamo_backends.interface.registry import get_backend, list_backends
from harness import cell_tables
from harness.cell_runs import run_cells
from harness.cells import DTYPES, Cell, Measuring, cells
from harness.ledger import Ledger, rows_of

MODELS = (
    *(("classic", name) for name in (
        "resnet18", "resnet50", "resnext50_32x4d", "alexnet", "mobilenet_v2", "mnasnet1_0", "vgg16",
        "bert", "squeezenet1_1", "vit_s_16")),
    ("transformers", "gpt2"),
)  # fmt: skip
"""Suite and name."""

BACKENDS = {
    "cuda": ("inductor", "cudagraphs", "cudagraphs_eager", "openxla", "onnxrt_cuda", "tensorrt",
             "nvfuser", "nvfuser_cudagraphs", "autotune"),
    "cpu": ("inductor", "openxla", "onnxrt", "autotune"),
}  # fmt: skip
"""By device type."""

TORCHS = {"inductor": ("cuda", "cpu"), "cudagraphs": ("cuda",)}
AUTOTUNE = cell_tables.AUTOTUNE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, or a part of it; returns the exit status."""
    settings = parse(arguments)
    console = harness.make_console()
    if settings.device == "cuda" and not torch.cuda.is_available():
        console.print(
            "[red]torch sees no CUDA device here.[/] `dynamo-backends doctor` says what is "
            "missing; --device cpu runs this program on the CPU, with the backends for it."
        )
        return 2
    try:
        todo = choose(settings)
        ledger = Ledger(settings.json, context(settings))
    except (ValueError, ResultError) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 2
    backends, absent = usable(settings)
    console.print(f"[dim]{harness.environment_line()}[/]")
    console.print(f"[dim]{cell_tables.machine(ledger.context)}[/]", highlight=False)
    for name, reason in absent.items():
        console.print(f"[dim]without {name}: {reason}[/]", highlight=False)
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        left = run_cells(
            todo, backends, ledger, functools.partial(measuring, settings), console,
            budget_s=settings.budget,
        )  # fmt: skip
    except (KeyboardInterrupt, SystemExit):
        ledger.interrupt()
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
    return report(ledger, left, settings, console)


def measuring(settings: argparse.Namespace, backends: Sequence[str]) -> Measuring:
    """How cells are measured: autotune chooses among the others."""
    singles = [name for name in backends if name != AUTOTUNE]
    options: dict[str, dict[str, Any]] = {
        AUTOTUNE: {"candidates": singles, "budget_s": settings.tuning}
    }
    return Measuring(settings.device, settings.scale, settings.rounds, settings.patience, options)


def choose(settings: argparse.Namespace) -> list[Cell]:
    """The cells of this call.

    Raises:
        ValueError: A model or a part does not exist.
    """
    known = {name: suite for suite, name in MODELS}
    for name in settings.models or ():
        if name not in known:
            raise ValueError(f"unknown model {name!r}; there are: {', '.join(known)}")
    names = settings.models or list(known)
    models = [(known[name], name) for name in names]
    every = list(cells(models, settings.batch, settings.dtype, settings.mode))
    number, count = part(settings.part)
    return every[number - 1 :: count]


def part(text: str) -> tuple[int, int]:
    """The numbers in a text such as "2/4".

    Raises:
        ValueError: It is not such a text.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--part must be like 2/4, the second of four parts, not {text!r}")
    return int(number), int(count)


def usable(settings: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The backends that can run here, and why others cannot."""
    found, absent = [], {}
    for name in settings.backend or BACKENDS[settings.device]:
        reason = why_not(name, settings.device)
        if reason:
            absent[name] = reason
        else:
            found.append(name)
    return found, absent


def why_not(name: str, device: str) -> str:
    """Why a backend cannot run on a device here; empty if it can."""
    if name in TORCHS:
        return "" if device in TORCHS[name] else f"it is not for {device}"
    if name not in list_backends():
        known = name in torch_backends(debugging=True)
        return "" if known else "this version does not have it"
    available = get_backend(name).availability()
    if not available.usable:
        return f"{available.reason} ({available.remedy})"
    if available.devices and device not in available.devices:
        return f"it can run on {', '.join(available.devices)} here, not on {device}"
    return ""


def context(settings: argparse.Namespace) -> dict[str, Any]:
    """What results depend on."""
    facts, environment = look(), harness.environment()
    return {
        "device": ", ".join(facts.visible)
        if settings.device == "cuda"
        else environment["processor"],
        "driver": facts.driver,
        "cuda": facts.built_for,
        "versions": environment["versions"],
        "python": environment["python"],
        "scale": settings.scale,
        "rounds": settings.rounds,
        "date": time.strftime("%Y-%m-%d"),
    }


def report(ledger: Ledger, left: int, settings: argparse.Namespace, console: Console) -> int:
    """Prints and saves the tables; returns the exit status."""
    results = in_order(ledger.results)
    for table in cell_tables.rich_tables(results):
        console.print(table)
    wrong = cell_tables.problems(results)
    for text in wrong:
        console.print(f"[red]{text}[/]", highlight=False)
    on_gpu = settings.device == "cuda" and settings.scale == "bench"
    aims = cell_tables.targets(results, len(MODELS)) if on_gpu else []
    for aim in aims:
        console.print(f"target: {aim.line()}", highlight=False)
    command = " ".join(["python", "benchmarks/gpu.py", *map(shlex.quote, settings.given)])
    page = cell_tables.markdown(results, ledger.context, aims, command)
    path = Path(settings.markdown or Path(settings.json).with_suffix(".md"))
    path.write_text(page, encoding="utf-8")
    console.print(f"saved {settings.json} and {path}", highlight=False)
    if left:
        console.print(f"{left} cells are left; the same command goes on with them")
    return int(bool(wrong) or any(aim.met is False for aim in aims))


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    results = in_order(rows_of(content))
    aims = [aim for aim in cell_tables.targets(results, len(MODELS)) if aim.found]
    tables = cell_tables.rich_tables(results, cell_tables.with_seconds)
    for column in (column for table in tables for column in table.columns):
        column.header = str(column.header).replace("\n", "")  # pages are wider than terminals
    return [
        *tables,
        *(f"Target: {aim.line()}" for aim in aims),
    ]


def in_order(results: cell_tables.Results) -> cell_tables.Results:
    """The results as tables and lines show them."""
    return dict(sorted(results.items(), key=lambda item: order(item[0])))


def order(cell: Cell) -> tuple[int, ...]:
    """Where a cell's table and line stand."""
    names = [name for _, name in MODELS]
    modes = ("inference", "training")
    return (
        modes.index(cell.mode),
        list(DTYPES).index(cell.dtype),
        cell.batch,
        names.index(cell.model),
    )


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these models")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], metavar="N")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--mode", nargs="+", default=["inference", "training"],
                        choices=["inference", "training"])  # fmt: skip
    parser.add_argument("--backend", action="append", metavar="NAME", help="only this; repeatable")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--scale", default="bench", choices=["bench", "test"], help="model sizes")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each")
    parser.add_argument("--patience", type=float, default=30.0, metavar="S",
                        help="no round of a cell begins so long after its first")  # fmt: skip
    parser.add_argument("--tuning", type=float, default=120.0, metavar="S",
                        help="seconds that autotune may take for a cell")  # fmt: skip
    parser.add_argument(
        "--part", default="1/1", metavar="K/N", help="only each Nth cell, from K on"
    )
    parser.add_argument(
        "--budget", type=float, metavar="S", help="begin no cell that may end later"
    )
    parser.add_argument("--json", default="gpu-results.json", metavar="FILE",
                        help="results; an existing file is continued")  # fmt: skip
    parser.add_argument("--markdown", metavar="FILE", help="default: FILE.md beside the JSON")
    settings = parser.parse_args(arguments)
    settings.given = list(sys.argv[1:] if arguments is None else arguments)
    return settings


if __name__ == "__main__":
    raise SystemExit(main())
