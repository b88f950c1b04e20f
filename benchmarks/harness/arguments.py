"""What the benchmark programs' command lines have in common."""

import argparse
from collections.abc import Sequence

from dynamo_backends.bench.suites import find_cases, suite


def arguments(summary: str, rounds: int | None = None) -> argparse.ArgumentParser:
    """Returns a parser with the options of everything that measures.

    Args:
        summary: What the program measures; its docstring, of which the first line is shown.
        rounds: How many samples are taken by default; None: there is no such option.
    """
    parser = argparse.ArgumentParser(description=summary.splitlines()[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="samples of each")
    parser.add_argument("--json", metavar="FILE", help="save the results")
    return parser


def model_arguments(
    summary: str, rounds: int, models: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    """Adds the options that choose models, by default `models` or all, and their sizes."""
    parser = arguments(summary, rounds)
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", default=models, help="only these models"
    )
    parser.add_argument("--scale", default="bench", choices=["bench", "test"], help="model sizes")
    parser.add_argument("--batch", type=int, default=4)
    return parser


def named_models(settings: argparse.Namespace, suites: Sequence[str]) -> list[str]:
    """Returns the models of suites that `--models` names, or all, as "classic/resnet18".

    Raises:
        ValueError: A model does not exist.
    """
    found = {name: suite(name, settings.scale, settings.batch) for name in suites}
    every = [case for some in found.values() for case in some]
    wanted = {case.name for case in find_cases(every, settings.models)}
    return [f"{name}/{c.name}" for name, some in found.items() for c in some if c.name in wanted]
