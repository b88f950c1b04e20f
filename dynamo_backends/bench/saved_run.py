"""The file of a benchmark run: saved after every cell, and continued by the next run."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_backends.bench import results_files
from dynamo_backends.bench.cells import Cell, Outcome, Run
from dynamo_backends.bench.results_files import ResultError

KIND = "dynamo-backends bench"

_BEFORE = {"device": "cpu", "accuracy": False}
"""What runs did that were saved before there was a choice."""


def save(run: Run, path: Path) -> None:
    """Writes a run; the file appears whole or not at all."""
    content = {
        "command": run.command,
        "context": run.context,
        "cells": [asdict(cell) for cell in run.cells],
        "results": [
            {"cell": asdict(cell), **outcome.to_dict()} for cell, outcome in run.outcomes.items()
        ],
    }
    results_files.write(path, KIND, content)


def read(path: Path) -> Run:
    """Reads a run from its JSON file.

    Raises:
        ResultError: There is no such file, or it is something else.
    """
    content = results_files.read(path, KIND)
    try:
        return run_of(content)
    except (ValueError, KeyError, TypeError) as error:
        raise results_files.damaged(path, KIND, error) from error


def run_of(content: Mapping[str, Any]) -> Run:
    """Returns the run that a file holds.

    Raises:
        KeyError, TypeError, ValueError: It holds something else.
    """
    run = Run(_BEFORE | content["context"], [Cell(**c) for c in content["cells"]])
    run.command = content["command"]
    for given in content["results"]:
        rest = dict(given)
        cell = Cell(**rest.pop("cell"))
        run.outcomes[cell] = Outcome.from_dict(rest)
    return run


def open_run(context: Mapping[str, Any], path: Path, resume: bool) -> Run:
    """Opens a run: resumes the one in a file, or starts an empty one.

    Args:
        context: What figures depend on that are to be measured.
        path: The file.
        resume: Go on with what is there: what it has is not measured again.

    Raises:
        ResultError: The file exists and is not to be continued; or it has results of another
            machine, version or way of measuring.
    """
    if not path.exists():
        return Run(dict(context), [])
    if not resume:
        raise ResultError(
            f"{path} exists. Pass --resume to continue this run, or --output to write another file."
        )
    found = read(path)
    results_files.check_context(path, found.context, context)
    return found
