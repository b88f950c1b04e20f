"""`dynamo-backends compile`, `tune` and `save`: what can be done before a program runs."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dynamo_backends.cli.bench import path, positive_number
from dynamo_backends.cli.explain import built, model_arguments, parse_options, waiting_line
from dynamo_backends.cli.listing import Row, print_rows
from dynamo_backends.interface.errors import reraise_as_model_error

if TYPE_CHECKING:
    from dynamo_backends.interface.report import CandidateReport

_MODEL = "MODEL is described in `dynamo-backends explain --help`.\n\nexamples:\n"


class Compile:
    """Fills the disk cache, so that a program with the same model compiles nothing."""

    SUMMARY = "compile a model into the disk cache"
    EXAMPLES = (
        _MODEL
        + """\
  dynamo-backends compile models.py:make_model --backend onnxrt
  dynamo-backends compile --traffic calls.json --backend openxla
"""
    )

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declares the command's arguments."""
        model_arguments(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Compiles; returns the exit status."""
        _compile(args, args.backend, parse_options(args.option))
        return 0


class Tune:
    """Has autotune decide for a model, and keeps the decisions."""

    SUMMARY = "let autotune choose the fastest backend for a model, and save the decision"
    EXAMPLES = (
        _MODEL
        + """\
  dynamo-backends tune torchvision:resnet18
  dynamo-backends tune models.py:make_model --budget 600 --option precision=bf16
"""
    )

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declares the command's arguments."""
        model_arguments(parser, has_backend=False)
        parser.add_argument("--budget", type=positive_number, default=120.0, metavar="S",
            help="tuning time in seconds, shared by all graphs (default: 120)")  # fmt: skip

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Tunes and prints each graph's candidates; returns the exit status."""
        from dynamo_backends.autotune.decisions import DecisionStore
        from dynamo_backends.capture.rendering import format_tuning_seconds
        from dynamo_backends.interface.report import record

        options = {"budget_s": args.budget, **parse_options(args.option)}
        with record() as reports:
            _compile(args, "autotune", options)
        console = Console()
        for report in reports:
            title = f"{report.kind} graph {report.capture}: {report.chosen}"
            console.print(title, markup=False, highlight=False)
            header = ("candidate", "compile s", "ms", "× eager")
            print_rows(console, header, [_row(each) for each in report.candidates])
            line = format_tuning_seconds(report.candidates, report.tuning_seconds)
            console.print(line, markup=False, highlight=False)
        folder = DecisionStore().folder
        console.print(f"decisions are in {folder}", markup=False, highlight=False, soft_wrap=True)
        return 0


def _row(candidate: "CandidateReport") -> Row:
    seconds, speedup = candidate.seconds, candidate.speedup
    numbers = (
        "-" if candidate.compile_s is None else f"{candidate.compile_s:.1f}",
        "-" if seconds is None else f"{seconds * 1e3:.3g}",
        "-" if speedup is None else f"{speedup[0]:.2f}",
    )
    cells = [(text, "") for text in (candidate.name, *numbers)]
    return Row(cells, candidate.reason or "chosen", below=True)


class Save:
    """Writes a package, as `dynamo_backends.save` does."""

    SUMMARY = "compile a model and save it to one file, for dynamo_backends.load"
    EXAMPLES = (
        _MODEL
        + """\
  dynamo-backends save models.py:make_model --backend onnxrt --output model.dbp
"""
    )

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declares the command's arguments."""
        model_arguments(parser, is_one_call=True)
        parser.add_argument("--output", type=path, default=Path("model.dbp"), metavar="FILE",
            help="file to write (default: model.dbp)")  # fmt: skip

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Saves; returns the exit status."""
        import dynamo_backends

        options, waiting = parse_options(args.option), waiting_line()
        model, ((positional, named),) = built(args, waiting)
        with waiting(f"compiling with {args.backend}"):
            dynamo_backends.save(
                model, args.output, positional, named, backend=args.backend, options=options
            )
        print(f"saved {args.output}, {args.output.stat().st_size / 1e6:.1f} MB")
        return 0


def _compile(args: argparse.Namespace, backend: str, options: dict[str, Any]) -> None:
    """Calls a compiled model until nothing is compiled any more, and prints what was."""
    import torch

    from dynamo_backends.capture.backend_resolution import resolve_backend
    from dynamo_backends.capture.warming import warm_up_calls

    resolved = resolve_backend(backend, options)
    model, calls = built(args, waiting_line())
    run = torch.compile(model, backend=resolved)
    with (
        torch.set_grad_enabled(args.train),
        reraise_as_model_error(f"{args.model} cannot be called"),
    ):
        done = warm_up_calls(run, [(tuple(args), dict(kwargs)) for args, kwargs in calls])
    compiled_here = done.executables - done.cache_hits
    print(
        f"graphs: {done.graphs}; executables: {compiled_here} compiled, {done.cache_hits} from the "
        f"disk cache; {done.seconds:.1f} s"
    )
