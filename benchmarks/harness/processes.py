"""Measuring in processes of their own, where nothing is warm and memory starts from nothing."""

import inspect
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_backends.workers import worker_process

_MARK = "@measured "
_BENCHMARKS = Path(__file__).resolve().parents[1]


class ChildError(RuntimeError):
    """A measuring process failed; the message ends with what it printed."""


def call_apart(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> Any:
    """Calls a function of a program in a fresh process with empty cache folders.

    Args:
        function: Of a module of benchmarks/. It returns what JSON can hold.
        *arguments: What JSON can hold.
        environment: Variables set in addition to this process's.
        timeout_s: Seconds after which the process is ended.

    Raises:
        ChildError: It failed.
    """
    code = inspect.unwrap(function).__code__
    module = Path(code.co_filename).resolve().relative_to(_BENCHMARKS).with_suffix("")
    command = ["-m", "harness", ".".join(module.parts), code.co_name, json.dumps(arguments)]
    with tempfile.TemporaryDirectory() as folder:
        variables = {**caches_in(folder), **(environment or {})}
        return run_child(command, variables, timeout_s)["result"]


def result_apart(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> dict[str, Any]:
    """Calls apart; returns {"error": last line that it printed} for a process that failed."""
    try:
        return dict(call_apart(function, *arguments, timeout_s=timeout_s))
    except ChildError as error:
        return {"error": str(error).splitlines()[-1]}


def caches_in(folder: str) -> dict[str, str]:
    """Returns variables that keep all caches in a folder."""
    names = "DYNAMO_BACKENDS_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
    return {name: f"{folder}/{name.lower()}" for name in names}


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


def hand_back(**values: Any) -> None:
    """Gives values that JSON can hold to the process that called `run_child`."""
    print(_MARK + json.dumps(values), flush=True)


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
