"""Tries a candidate in a process of its own first: a crash or a hang costs only the candidate."""

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import fx

from dynamo_backends.autotune import serialization
from dynamo_backends.autotune.arguments import Arguments
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.names import SPLIT
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.tuning.children import environment, kill

TASK, RESULT = "task.json", "result.json"


def is_isolated(candidate: Candidate, options: AutotuneOptions) -> bool:
    """Returns whether a candidate is tried in a process of its own first."""
    if candidate.backend == SPLIT:
        return False
    return options.isolate == "all" or options.isolate == candidate.owner


def rehearsed(
    candidate: Candidate,
    captured: fx.GraphModule,
    arguments: Arguments,
    options: AutotuneOptions,
    training: bool,
) -> str:
    """Compiles, calls and verifies a candidate in another process.

    Returns:
        What went wrong there, in words; "" if nothing did.
    """
    with tempfile.TemporaryDirectory(prefix="dynamo-backends-") as name:
        folder = Path(name)
        try:
            serialization.write(folder, captured, arguments.values)
        except serialization.NotWritable as error:
            return f"not tried: it needs a process of its own, and {error}"
        task = {
            "candidate": dataclasses.asdict(candidate),
            "options": dataclasses.asdict(options.exact()),
            "uncopied": [] if training else sorted(arguments.uncopied),
            "mutated": sorted(arguments.mutated),
            "training": training,
        }
        (folder / TASK).write_text(json.dumps(task), encoding="utf-8")
        return _run(folder, options.trial_timeout_s)


def _run(folder: Path, timeout_s: float) -> str:
    with open(folder / "output", "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "dynamo_backends.autotune.rehearsal", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            status = child.wait(timeout_s)
        except BaseException as error:
            kill(child)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"did not finish within {timeout_s:g} s in a process of its own"
    return _explain(folder, status)


def _explain(folder: Path, status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        return f"crashed with {name} in a process of its own"
    try:
        result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        lines = (folder / "output").read_text(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return f"ended with exit status {status} in a process of its own{last}"
    return str(result["problem"])
