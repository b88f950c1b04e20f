"""The file of a benchmark run: saved after every cell, and continued by the next run."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_backends.bench.cells import Cell, Outcome, Run
from dynamo_backends.interface.errors import DynamoBackendsError
from dynamo_backends.runtime.cache import write_whole

KIND = "dynamo-backends bench"


class ResultError(DynamoBackendsError):
    """A file of results cannot be read or continued; the message says why and what to do."""


def save(run: Run, path: Path) -> None:
    """Writes a run; the file appears whole or not at all."""
    content = {
        "kind": KIND,
        "command": run.command,
        "context": run.context,
        "cells": [asdict(cell) for cell in run.cells],
        "results": [
            {"cell": asdict(cell), **outcome.to_dict()} for cell, outcome in run.outcomes.items()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def read(path: Path) -> Run:
    """Reads a run.

    Raises:
        ResultError: There is no such file, or it is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["kind"] != KIND:
            raise ValueError(f"it holds {content['kind']!r}")
        run = Run(
            {"device": "cpu"} | content["context"], [Cell(**cell) for cell in content["cells"]]
        )
        run.command = content["command"]
        for given in content["results"]:
            cell = Cell(**given.pop("cell"))
            run.outcomes[cell] = Outcome.from_dict(given)
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError(
            f"{path} is no result of `dynamo-backends bench` ({type(error).__name__}: {error})."
        ) from error
    return run


def begin(asked: Run, path: Path, resume: bool) -> Run:
    """The run that goes on in a file, or begins there.

    Args:
        asked: What is to be measured.
        path: The file.
        resume: Go on with what is there: what it has is not measured again.

    Raises:
        ResultError: The file exists and is not to be continued; or it has results of another
            machine, version or way of measuring.
    """
    if not path.exists():
        return asked
    if not resume:
        raise ResultError(f"{path} exists: --resume goes on with it, --output names another file.")
    found = read(path)
    different = differences(found.context, asked.context)
    if different:
        raise ResultError(
            f"{path} holds results that do not belong together with new ones: "
            f"{'; '.join(different)}. Name another file by --output, or delete it."
        )
    found.cells = list(dict.fromkeys([*found.cells, *asked.cells]))
    return found


def differences(found: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """In what two contexts differ, in words; the dates are not compared."""
    return [
        f"{name} is {own.get(name)!r} and was {found.get(name)!r}"
        for name in sorted({*found, *own} - {"date"})
        if found.get(name) != own.get(name)
    ]
