"""Tries a candidate in a process of its own first: a crash or a hang costs only the candidate."""

import dataclasses
import signal
import tempfile
from pathlib import Path

from torch import fx

from dynamo_backends.autotune import serialization
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.options import SPLIT, AutotuneOptions
from dynamo_backends.autotune.trial_inputs import TrialInputs
from dynamo_backends.workers.worker_process import ProcessLostError, WorkerProcess

COMMAND = ("-m", "dynamo_backends.autotune.worker")
"""What Python runs in the process."""


def is_isolated(candidate: Candidate, options: AutotuneOptions) -> bool:
    """Returns whether a candidate is first tried in a subprocess."""
    if candidate.backend == SPLIT:
        return False
    return options.isolate == "all" or options.isolate == candidate.owner


def run_isolated(
    candidate: Candidate,
    captured: fx.GraphModule,
    arguments: TrialInputs,
    options: AutotuneOptions,
    training: bool,
) -> str:
    """Compiles, calls and verifies a candidate in a subprocess.

    Returns:
        What went wrong there, in words; "" if nothing did.
    """
    with tempfile.TemporaryDirectory(prefix="dynamo-backends-") as folder:
        try:
            serialization.write(Path(folder), captured, arguments.values)
        except serialization.GraphNotSerializableError as error:
            return f"not tried: its trial needs a separate process, and {error}"
        request = {
            "folder": folder,
            "candidate": dataclasses.asdict(candidate),
            "options": dataclasses.asdict(options.without_int8()),
            "uncopied": [] if training else sorted(arguments.uncopied),
            "mutated": sorted(arguments.mutated),
            "training": training,
        }
        try:
            with WorkerProcess(COMMAND, output=Path(folder) / "output") as worker:
                problem: str = worker.ask(request, options.trial_timeout_s)["problem"]
        except ProcessLostError as lost:
            return describe_lost_process(lost, options.trial_timeout_s)
        return problem


def describe_lost_process(lost: ProcessLostError, timeout_s: float) -> str:
    """Describes for the report how a candidate's subprocess timed out, crashed or exited.

    Args:
        lost: The loss.
        timeout_s: Seconds that it had.
    """
    if lost.status is None:
        return f"did not finish within {timeout_s:g} s in a process of its own"
    if lost.status < 0:
        return f"crashed with {signal.Signals(-lost.status).name} in a process of its own"
    last = f": {lost.last_line}" if lost.last_line else ""
    return f"ended with exit status {lost.status} in a process of its own{last}"
