"""`dynamo-backends explain MODEL`: reports on a compiled model."""

import argparse
import ast
import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dynamo_backends.cli.bench import path, positive
from dynamo_backends.interface.errors import OptionError, reraise_as_model_error
from dynamo_backends.interface.logs import silence_loggers

if TYPE_CHECKING:
    from dynamo_backends.bench.explained import Times
    from dynamo_backends.capture.explanation import Explanation

SUMMARY = "report on a compiled model: graphs, breaks, fallbacks, recompilations"

EXAMPLES = """\
MODEL is one of
  hf:BertConfig             a configuration or model class of transformers, with default settings
  torchvision:resnet18      a model of torchvision
  timm:resnet18             a model of timm
  path/to/file.py:factory   a function in a file; it returns (model, args), (model, args, kwargs),
                            or a module with example inputs in its attribute example_inputs.
                            If it has a parameter named batch, --batch is passed to it.

Weights and inputs are random; nothing is downloaded.

FILE.json contains calls. Each call is a list of the shapes of the model's tensor arguments, or a
dict from argument names to shapes. "model" is optional if MODEL is given:
  {"model": "torchvision:resnet18", "calls": [[[1, 3, 224, 224]], [[2, 3, 224, 224]]]}

examples:
  dynamo-backends explain torchvision:resnet18
  dynamo-backends explain hf:BertConfig --small --backend inductor
  dynamo-backends explain hf:GPT2LMHeadModel --small --train
  dynamo-backends explain --traffic calls.json --backend onnxrt --option while_compiling=eager
  dynamo-backends explain models.py:make_model --batch 8 --option freezing=off --json
  dynamo-backends explain torchvision:resnet18 --backend autotune --html resnet18.html
"""

Waiting = Callable[[str], AbstractContextManager[Any]]

_ROUNDS = 20  # for a page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    model_arguments(parser)
    parser.add_argument(
        "--dynamic",
        action="store_true",
        help="compile with dynamic=True (symbolic sizes from the first call)",
    )
    parser.add_argument(
        "--bisect",
        action="store_true",
        help=("if a graph computes wrong results, find the operators that cause them"),
    )
    parser.add_argument(
        "--slow",
        action="store_true",
        help=("if a block is slower than eager, find the operators that cause it"),
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a report")
    parser.add_argument(
        "--html", type=path, metavar="FILE.html", help="also write an HTML page, with timings"
    )
    parser.add_argument("--rounds", type=positive, metavar="N",
        help="number of timing rounds, for eager and for compiled code (--html: 20)")  # fmt: skip


def model_arguments(
    parser: argparse.ArgumentParser, has_backend: bool = True, is_one_call: bool = False
) -> None:
    """Declares the arguments that say what is compiled, and with what.

    Args:
        parser: Gets them.
        has_backend: Whether the user names a backend.
        is_one_call: Whether it is one call, for inference.
    """
    parser.set_defaults(traffic=None, train=False)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="", help="model to compile, see below"
    )
    if not is_one_call:
        parser.add_argument(
            "--traffic", type=path, metavar="FILE.json", help="calls of several sizes, see below"
        )
        parser.add_argument(
            "--train", action="store_true", help="run in training mode, with gradients"
        )
    if has_backend:
        parser.add_argument(
            "--backend", default="openxla", help="backend, as for torch.compile (default: openxla)"
        )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the backend; a value that is not a Python literal is passed as a string",
    )
    parser.add_argument("--batch", type=positive,
        help="batch size (default: 2, or the default of the factory function)")  # fmt: skip
    parser.add_argument(
        "--small",
        action="store_true",
        help="hf: use a small configuration (2 layers, vocabulary of 512)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the explanation; returns the exit status."""
    options = parse_options(args.option)
    if args.html:
        from dynamo_backends.bench.packages import import_jinja2

        import_jinja2()  # now, not after minutes
    import torch

    waiting = waiting_line()
    model, calls = built(args, waiting)
    with torch.set_grad_enabled(args.train):
        explanation, times = _explained(args, options, model, calls, waiting)
    if args.json:
        measured = {} if times is None else {"times": times.to_dict()}
        print(json.dumps(explanation.to_dict() | measured, indent=2))
    else:
        _print(explanation, times)
    if args.html:
        from dynamo_backends.bench.explained_page import explained_page

        command = shlex.join(["dynamo-backends", *args.given])
        page = explained_page(explanation, times, command)
        args.html.write_text(page, encoding="utf-8")
    return 0


def waiting_line() -> Waiting:
    """Returns what shows a line on a terminal while something is done."""
    progress = Console(stderr=True)
    return progress.status if progress.is_terminal else nullcontext


def built(args: argparse.Namespace, waiting: Waiting) -> tuple[Any, list[tuple[Any, Any]]]:
    """Builds the model and the calls that the command line names.

    Args:
        args: See `model_arguments`.
        waiting: See `waiting_line`.

    Returns:
        The model, and positional and keyword arguments of each call.
    """
    with waiting("building the model"):
        import torch

        from dynamo_backends.cli import models

        torch.manual_seed(0)
        given = models.read(args.traffic) if args.traffic else None
        name = args.model or (given.model if given is not None else "")
        loaded = models.load(name, batch=args.batch, small=args.small)
        if isinstance(loaded.model, torch.nn.Module):
            loaded.model.train(args.train)
        if given is None:
            return loaded.model, [(loaded.args, loaded.kwargs)]
        return loaded.model, [models.arguments(loaded, call) for call in given.calls]


def _print(explanation: "Explanation", times: "Times | None") -> None:
    """Prints the report; before it the result, and what makes it slower than eager, if timed."""
    console = Console()
    if times is not None:
        from dynamo_backends.bench.explained import why_slower
        from dynamo_backends.bench.explained_page import headline

        for text in (headline(explanation, times), *why_slower(explanation, times)):
            console.print(text, markup=False, highlight=False)
        console.print()
    console.print(explanation)


def _explained(
    args: argparse.Namespace,
    options: dict[str, Any],
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, Any]],
    waiting: Waiting,
) -> "tuple[Explanation, Times | None]":
    """Makes the calls, and times the last one if that is wanted."""
    from dynamo_backends.capture.explain import Explainer

    rounds = args.rounds if args.rounds is not None else _ROUNDS * bool(args.html)
    explainer = Explainer(
        function,
        backend=args.backend,
        options=options,
        dynamic=True if args.dynamic else None,
        bisect=args.bisect,
        slow=args.slow,
        switched=bool(rounds),
    )
    with explainer:
        with waiting(f"compiling with {args.backend}"):
            for positional, named in calls:
                called = reraise_as_model_error(f"{args.model or 'the model'} cannot be called")
                with called, silence_loggers("torch._subclasses"):  # which logs what models raise
                    explainer.differentiate(explainer(*positional, **named))
        explanation = explainer.explanation()
        if not rounds:
            return explanation, None
        from dynamo_backends.bench.explained import gradients_too, measure

        runs = (partial(f, *positional, **named) for f in (function, explainer))
        eager, compiled = (gradients_too(run, explainer) for run in runs)
        with waiting("measuring"):
            return explanation, measure(explainer, eager, compiled, rounds)


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a backend from arguments such as "verify=True".

    Raises:
        OptionError: An argument has no "=".
    """
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionError(f"--option must have the form NAME=VALUE, not {text!r}.")
        try:
            options[name.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name.strip()] = value
    return options
