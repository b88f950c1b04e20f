"""`dynamo-backends bench SUITE`: models on backends, whether right and how fast."""

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dynamo_backends.bench import sources
from dynamo_backends.bench.cells import Cell
from dynamo_backends.bench.sources import Case
from dynamo_backends.interface.errors import OptionError

if TYPE_CHECKING:
    from dynamo_backends.bench.cells import BenchConfig, Cell, Run
    from dynamo_backends.bench.sources import Case


_DEFAULT_BACKEND = "openxla"


@dataclass(frozen=True)
class Selection:
    """The cells that a command line names; empty fields where it names none.

    Attributes:
        models: Names of models.
        backends: As in `Cell.backend`.
        modes: As in `Cell.mode`.
        dtypes: As in `Cell.dtype`.
        batches: Examples per call.
    """

    models: Sequence[str] = ()
    backends: Sequence[str] = ()
    modes: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    batches: Sequence[int] = ()

    def of(self, known: Sequence[Case], begun: Sequence[Cell] = ()) -> list[Cell]:
        """Returns the cells that are asked for, in the order in which they are measured.

        Args:
            known: The models of the suite.
            begun: Cells of the run that goes on. What is not named is as there: without any name
                they are what is asked for.

        Raises:
            ModelError: There is no model of a given name.
        """
        if self.models:
            sources.named(known, self.models)
        cases = {case.name: case for case in known}
        asked = self._like(begun or [Cell(name, _DEFAULT_BACKEND) for name in cases])
        cells = [
            cell
            for cell in asked
            if cell.model not in cases or sources.has_mode(cases[cell.model], cell.mode)
        ]
        wanted, old = set(cells), set(begun)
        return [*(c for c in begun if c in wanted), *(c for c in cells if c not in old)]

    def _like(self, cells: Sequence[Cell]) -> list[Cell]:
        """Cells with what is named in place of their own, each once; those of a model together."""
        found = [replace(c, backend=name) for c in cells for name in self.backends or [c.backend]]
        named: dict[str, Sequence[Any]] = {
            "model": self.models,
            "batch": self.batches,
            "dtype": self.dtypes,
            "mode": self.modes,
        }
        for field, values in named.items():
            if values:
                found = [replace(cell, **{field: value}) for value in values for cell in found]
            found = list(dict.fromkeys(found))
        return found


SUMMARY = "measure suites of models on backends: accuracy, speed, compile time"

EXAMPLES = """\
SUITE is one of
  classic, transformers     models of this package: convolutional nets, BERT, ViT; small transformers
  huggingface, timm         the CPU model lists of PyTorch's benchmark runners, with random weights
  traffic                   inference requests and training steps with changing input sizes
  generation                `generate` with static caches; tokens must equal those of eager
  torchbench                TorchBench; --path CHECKOUT of https://github.com/pytorch/benchmark
  FILE.py:MODELS            a dict from names to functions, or a function that returns such a dict;
                            each function returns (model, args) or another form of `explain --help`
  gpu                       the classic models and GPT-2, as in benchmarks/gpu.py
  recurrent, unet, control_flow, full_size

BACKEND is a backend name of torch.compile, "eager" (compares eager with itself, which shows the
noise), FILE.py:FUNCTION for a backend of your own, or export:onnxruntime, export:openvino (the
model is exported and runs in a session of the vendor without torch.compile).

Each model is measured with each backend in a separate process. Each result is written to
OUTPUT.json as soon as it is available; OUTPUT.html is the report. The exit status is 1 if a
backend failed.

`bench compare A.json B.json` lists what is slower, faster or broken in B; the exit status is 1 if B
has a regression. `bench page A.json` writes the HTML report again.

examples:
  dynamo-backends bench classic --backends openxla inductor
  dynamo-backends bench huggingface --backends openxla --timeout 1800 --memory 20 --output hf.json
  dynamo-backends bench huggingface --backends openxla --timeout 1800 --memory 20 --output hf.json --resume
  dynamo-backends bench huggingface --timeout 1800 --memory 20 --output hf.json --resume --models T5Small
  dynamo-backends bench models.py:models --backends backend.py:mine --mode inference training
  dynamo-backends bench compare before.json after.json
"""  # noqa: E501 - a command is one line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add("suite", metavar="SUITE", help='suite of models, see below; or "compare" or "page"')
    add(
        "files",
        nargs="*",
        type=path,
        metavar="FILE.json",
        help="result files, for compare and page",
    )
    add("--backends", nargs="+", metavar="BACKEND", help="backends to measure (default: openxla)")
    add("--models", nargs="+", metavar="NAME", help="measure only these models")
    add("--mode", nargs="+", choices=["inference", "training", "step"],
        help="training: forward and backward; step: forward, backward and optimizer, "
             "as one graph if the backend supports it (default: inference)")  # fmt: skip
    add(
        "--dtype",
        nargs="+",
        choices=["float32", "bf16"],
        help="dtypes to measure (default: float32)",
    )
    add(
        "--batch",
        nargs="+",
        type=positive,
        metavar="N",
        help="number of examples per call (default: the suite's own)",
    )
    add(
        "--device",
        default="cpu",
        choices=["cpu", "cuda"],
        help="device that runs the models (default: cpu)",
    )
    add("--threads", type=positive, metavar="N", help="number of torch threads")
    add("--accuracy", action="store_true", help="check results only, without timing")
    add(
        "--rounds",
        type=positive,
        default=20,
        metavar="N",
        help="number of timing rounds (default: 20)",
    )
    add("--patience", type=positive_number, default=60.0, metavar="S",
        help="start no new round after S seconds; at least 8 run (default: 60)")  # fmt: skip
    add("--timeout", type=positive_number, default=900.0, metavar="S",
        help="time limit for each process in seconds (default: 900)")  # fmt: skip
    add(
        "--memory",
        type=positive_number,
        metavar="GB",
        help="limit of resident memory for each process in GB",
    )
    add(
        "--scale",
        default="bench",
        choices=["bench", "test"],
        help="size of the models: for benchmarks, or small for tests",
    )
    add("--path", type=path, metavar="CHECKOUT", help="TorchBench checkout")
    add(
        "--output",
        type=path,
        default=Path("bench.json"),
        metavar="FILE.json",
        help="file for the results (default: bench.json)",
    )
    add("--resume", action="store_true",
        help="continue the run in OUTPUT; --models, --backends, --mode, --dtype and "
             "--batch, if given, replace those of the run")  # fmt: skip
    add("--threshold", type=share, default=0.05, metavar="SHARE",
        help="compare: ignore smaller relative changes (default: 0.05)")  # fmt: skip
    add(
        "--html",
        type=path,
        metavar="FILE.html",
        help="HTML page to write (default: OUTPUT.html; for compare: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, compares or writes a page; returns the exit status."""
    console = output_console()
    if args.suite == "compare":
        return _compare(args, console)
    if args.suite == "page":
        return _page(args, console)
    if args.files:
        raise OptionError(
            f"{str(args.files[0])!r} is not an argument of a suite. Pass --models to select models."
        )
    return _measure(args, console)


def _measure(args: argparse.Namespace, console: Console) -> int:
    from dynamo_backends.bench import packages, runs, saved_run

    for needed in (packages.import_psutil, packages.import_stats, packages.import_jinja2):
        needed()  # now, not after hours
    how, output = _how(args), args.output
    run = saved_run.open_run(runs.context(how), output, args.resume)
    cells = _asked(args, how, run)
    run.command = shlex.join(["dynamo-backends", *args.given])
    try:
        runs.measure_all(run, cells, how, output, console)
    except KeyboardInterrupt:
        if run.outcomes:
            _report(run, output, args.html, console)
        console.print(f"Interrupted. {output} has "
                      f"{len(run.outcomes)} of {len(run.cells)} "
                      "results; run the same command with --resume "
                      "to continue.", highlight=False)  # fmt: skip
        return 130
    _report(run, output, args.html, console)
    failed = [o for o in run.outcomes.values() if not o.passed and not o.eager_failed]
    return int(bool(failed))


def _how(args: argparse.Namespace) -> "BenchConfig":
    from dynamo_backends.bench import environment
    from dynamo_backends.bench.cells import BenchConfig

    checkout = str(args.path.resolve()) if args.path else ""
    environment.require_torch_device(args.device)
    return BenchConfig(
        absolute(args.suite), checkout, args.scale, args.rounds, args.patience, args.threads,
        args.timeout, args.memory, args.device, args.accuracy,
    )  # fmt: skip


def _asked(args: argparse.Namespace, how: "BenchConfig", begun: "Run") -> "list[Cell]":
    from dynamo_backends.bench import backends, exports, sources

    known = sources.cases(how, args.batch[0] if args.batch else None)
    named = Selection(
        args.models or (), [*map(absolute, args.backends or ())],
        args.mode or (), args.dtype or (), args.batch or (),
    )  # fmt: skip
    cells = named.of(known, begun.cells)
    for name in named.backends or dict.fromkeys(c.backend for c in begun.left_of(cells)):
        backends.require_backend(name)
    _require_exportable([c for c in cells if exports.is_export(c.backend)], known, how)
    if not cells:
        mode = " ".join(args.mode or ["inference"])
        raise OptionError(f"no model of {args.suite} supports --mode {mode}.")
    return cells


def _require_exportable(
    cells: "Sequence[Cell]", known: "Sequence[Case]", how: "BenchConfig"
) -> None:
    from dynamo_backends.bench.sources import StreamCase

    streams = {case.name for case in known if isinstance(case, StreamCase)}
    other = [c for c in cells if c.mode != "inference" or c.model in streams]
    if other or (cells and how.device != "cpu"):
        raise OptionError(
            "export:... supports inference on the CPU only, with models of one input size."
        )


def _report(run: "Run", results: Path, html: Path | None, console: Console) -> None:
    from dynamo_backends.bench import pages, summary, tables

    page = html or results.with_suffix(".html")
    page.write_text(pages.run_page(run), encoding="utf-8")
    console.print(tables.print_summary(run))
    console.print(summary.headline(run), highlight=False)
    console.print(f"saved {results} and {page}", highlight=False, soft_wrap=True)


def _compare(args: argparse.Namespace, console: Console) -> int:
    from dynamo_backends.bench import comparison, pages, saved_run

    if len(args.files) != 2:
        raise OptionError("compare takes two files: bench compare BEFORE.json AFTER.json.")
    before, after = map(saved_run.read, args.files)
    found = comparison.compare_runs(before, after, args.threshold)
    for text in found.contexts:
        console.print(f"[yellow]the runs differ:[/] {text}", highlight=False)
    console.print(comparison.table(found.changes))
    for name, cells in (("first", found.missing), ("second", found.new)):
        if cells:
            console.print(f"{len(cells)} cells are in the {name} run only", highlight=False)
    console.print(found.headline, highlight=False)
    if args.html:
        args.html.write_text(pages.comparison_page(found), encoding="utf-8")
    return int(bool(found.of("regression")))


def _page(args: argparse.Namespace, console: Console) -> int:
    from dynamo_backends.bench import saved_run

    if len(args.files) != 1:
        raise OptionError("page takes one file: bench page RESULT.json.")
    (results,) = args.files
    _report(saved_run.read(results), results, args.html, console)
    return 0


def absolute(name: str) -> str:
    """FILE.py:NAME by the whole path of the file, wherever a later run is begun."""
    file, _, rest = name.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{rest}" if file.endswith(".py") else name


def output_console(stderr: bool = False) -> Console:
    """Returns the terminal, or 120 columns elsewhere."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=120, stderr=stderr)


def natural(text: str) -> int:
    """Parses an integer of at least 0, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a non-negative integer, not {text!r}")
    return int(text)


def path(text: str) -> Path:
    """Returns a file or folder, for argparse; "~" is the user's home."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be the path of a file or directory, not {text!r}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # there is no such user
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def positive(text: str) -> int:
    """Returns a number from 1, for argparse."""
    if not text.isdecimal() or not 1 <= (number := int(text)) < 2**31:
        raise argparse.ArgumentTypeError(f"must be a positive integer, not {text!r}")
    return number


def positive_number(text: str) -> float:
    """Returns a finite number above 0, for argparse."""
    if (number := share(text)) == 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {text!r}")
    return number


def share(text: str) -> float:
    """Parses a finite number of at least 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a non-negative finite number, not {text!r}")
    return number
