"""`dynamo-backends explain MODEL`: what becomes of a model under a backend."""

import argparse
import ast
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from dynamo_backends.interface.errors import OptionError

SUMMARY = "what becomes of a model under a backend: graphs, breaks, fallbacks, recompilations"

EXAMPLES = """\
MODEL is one of
  hf:BertConfig             a configuration or model class of transformers, default settings
  torchvision:resnet18      a model of torchvision
  timm:resnet18             a model of timm
  path/to/file.py:factory   a function in a file; it returns (model, args), (model, args, kwargs),
                            or a module that has its example inputs as the attribute example_inputs.
                            If it has a parameter called batch, it gets --batch.

Weights and inputs are random; nothing is downloaded.

FILE.json has calls, each a list of the shapes of the tensors among the model's arguments, or a
dict from names of arguments to shapes. "model" may be left out where MODEL is given:
  {"model": "torchvision:resnet18", "calls": [[[1, 3, 224, 224]], [[2, 3, 224, 224]]]}

examples:
  dynamo-backends explain torchvision:resnet18
  dynamo-backends explain hf:BertConfig --small --backend inductor
  dynamo-backends explain hf:GPT2LMHeadModel --small --train
  dynamo-backends explain --traffic calls.json --backend onnxrt --option while_compiling=eager
  dynamo-backends explain models.py:make_model --batch 8 --option freezing=off --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="see below")
    parser.add_argument("--traffic", metavar="FILE.json", help="calls of several sizes, see below")
    parser.add_argument("--backend", default="openxla", help="a name that torch.compile takes")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend; a value that is not a Python literal is a string",
    )
    parser.add_argument("--batch", type=_positive, default=2, help="batch size (default: 2)")
    parser.add_argument("--small", action="store_true", help="hf: 2 layers, 512 words")
    parser.add_argument("--train", action="store_true", help="training mode, with gradients")
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes from the start")
    parser.add_argument(
        "--bisect", action="store_true", help="where a graph is wrong, find the operators that are"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a report")


def run(args: argparse.Namespace) -> int:
    """Prints the explanation; returns the exit status."""
    options = parse_options(args.option)
    progress = Console(stderr=True)
    waiting: Callable[[str], Any] = progress.status if progress.is_terminal else nullcontext
    with waiting("building the model"):
        import torch

        from dynamo_backends.capture.explain import Explainer
        from dynamo_backends.cli import traffic
        from dynamo_backends.cli.models import load

        torch.manual_seed(0)
        given = traffic.read(args.traffic) if args.traffic else None
        model = args.model or (given.model if given is not None else "")
        loaded = load(model, batch=args.batch, small=args.small)
        if isinstance(loaded.model, torch.nn.Module):
            loaded.model.train(args.train)
    dynamic = True if args.dynamic else None
    explainer = Explainer(
        loaded.model, backend=args.backend, options=options, dynamic=dynamic, bisect=args.bisect
    )
    with (
        waiting(f"compiling {model} with {args.backend}"),
        explainer,
        torch.set_grad_enabled(args.train),
    ):
        calls = [(loaded.args, loaded.kwargs)]
        if given is not None:
            calls = [traffic.arguments(loaded, call) for call in given.calls]
        for arguments, named in calls:
            explainer.differentiate(explainer(*arguments, **named))
    explanation = explainer.explanation()
    if args.json:
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        Console().print(explanation)
    return 0


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a backend from arguments such as "verify=True".

    Raises:
        OptionError: An argument has no "=".
    """
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionError(f"an option is written NAME=VALUE, not {text!r}.")
        try:
            options[name.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name.strip()] = value
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, not {text!r}")
    return int(text)
