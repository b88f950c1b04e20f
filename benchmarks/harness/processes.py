"""Measuring in processes of their own, where nothing is warm and memory starts from nothing."""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_backends.workers import worker_process

_MARK = "@measured "


class ChildError(RuntimeError):
    """A measuring process failed; the message ends with what it printed."""


def run_child(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> dict[str, Any]:
    """Runs a Python program that calls `hand_back`, and returns what it handed back.

    Args:
        arguments: What follows `python` on the command line.
        environment: Variables set in addition to this process's.
        timeout_s: Seconds after which the process is ended.

    Raises:
        ChildError: It failed, or handed nothing back.
    """
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**worker_process.child_environment(), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"{' '.join(arguments)}: not done after {timeout_s:.0f} s") from error
    for line in reversed(done.stdout.splitlines()):
        if done.returncode == 0 and line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    tail = (done.stderr or done.stdout)[-2000:]
    raise ChildError(f"{' '.join(arguments)}: exit status {done.returncode}\n{tail}")


def result_of_child(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> dict[str, Any]:
    """As `run_child`; of a process that failed {"error": the last line of what it printed}."""
    try:
        return run_child(arguments, environment, timeout_s)
    except ChildError as error:
        return {"error": str(error).splitlines()[-1]}


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def hand_back(**values: Any) -> None:
    """In the child: gives values that JSON can hold to the process that called `run_child`."""
    print(_MARK + json.dumps(values), flush=True)
