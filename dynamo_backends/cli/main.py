"""Reads the command line and runs a command."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from dynamo_backends import __version__
from dynamo_backends.cli import (
    bench,
    building,
    cache,
    conformance,
    doctor,
    explain,
    inspect_package,
    listing,
    verifying,
)
from dynamo_backends.interface.errors import DynamoBackendsError

_COMMANDS: dict[str, Any] = {
    "list": listing,
    "doctor": doctor,
    "explain": explain,
    "cache": cache,
    "bench": bench,
    "conformance": conformance,
    "compile": building.Compile,
    "tune": building.Tune,
    "save": building.Save,
    "inspect": inspect_package,
    "verify": verifying,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Returns:
        The exit status: 0; 1 if `doctor` or `verify` found something broken, a backend failed in
        `bench` or `conformance`, or `bench compare` found a regression; 2 if the command cannot be
        carried out as given; 130 and 143 if `bench` or `conformance` was interrupted.
    """
    args = _parser().parse_args(argv)
    args.given = list(sys.argv[1:] if argv is None else argv)
    try:
        status: int = _COMMANDS[args.command].run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads the output has seen enough
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - flushed at the end
        return 141
    except Exception as error:
        # Dynamo wraps what a backend raises.
        own = getattr(error, "inner_exception", None) or error
        if not isinstance(own, DynamoBackendsError | OSError):
            raise
        print(f"dynamo-backends {args.command}: {own}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynamo-backends",
        description=(
            "Backends for torch.compile: list them, check what works on this machine, explain what "
            "is compiled of a model, and measure speed and accuracy."
        ),
    )
    parser.add_argument("--version", action="version", version=f"dynamo-backends {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.SUMMARY,
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return parser
