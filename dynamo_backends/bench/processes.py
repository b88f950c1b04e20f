"""Measures a cell in processes of its own, and says what became of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_backends.bench.cells import OF_EAGER, Cell, How, Outcome, Status
from dynamo_backends.bench.packages import import_psutil
from dynamo_backends.tuning import children

_LOOK_S = 0.5  # between looks at a process: they take time from what is measured
_STAGES = {
    "load": "while the model was built",
    "eager": "while eager ran",
    "reference": "while eager ran in float64",
    "compile": "while it was compiled and called first",
    "compare": "while it was called",
    "rounds": "while it was timed",
    "calls": "while it was called",
    "coverage": "while it was called",
    "done": "while its process ended",
}
_GB = 10**9


def measure(cell: Cell, how: How) -> Outcome:
    """Measures a cell: once from cold and, if that passes, once from warm if times are asked for.

    Whatever the processes do, the outcome says it: only an interruption of this one is raised, and
    ends them.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        found, failure = _process(cell, how, "cold", Path(folder))
        if failure is None and "status" not in found and not how.accuracy:
            more, failure = _process(cell, how, "warm", Path(folder))
            if failure is not None:
                failure = failure[0], f"in the second process: {failure[1]}"
                found |= {"stage": "warm"}
            notes = dict.fromkeys(x["note"] for x in (found, more) if x.get("note"))
            found = {**more, **found, "note": "; ".join(notes)}
    status: Status = found.pop("status", "pass")
    reason = found.pop("reason", "")
    if failure is not None:
        status, reason = failure
        if status == "fail_to_run" and found.get("stage", "load") in OF_EAGER:
            status = "eager_fail_to_run"
    seconds = time.perf_counter() - start
    return Outcome.from_dict({**found, "status": status, "reason": reason, "seconds": seconds})


Failure = tuple[Status, str]


def _process(
    cell: Cell, how: How, kind: str, folder: Path
) -> tuple[dict[str, Any], Failure | None]:
    """Runs one process; returns what it told, and how it failed."""
    file, log = folder / f"{kind}.jsonl", folder / f"{kind}.log"
    asked = {"cell": asdict(cell), "how": asdict(how), "kind": kind, "parent": os.getpid()}
    file.write_text(json.dumps(asked) + "\n", encoding="utf-8")
    arguments = [sys.executable, "-m", "dynamo_backends.bench.child", str(file)]
    with (
        log.open("wb") as out,
        _started(arguments, _environment(how, folder), out) as child,
    ):
        ended = _watch(child, how)
    found = _told(file)
    stage = _STAGES.get(found.get("stage", "load"), "")
    error, out_of_memory = found.pop("error", None), found.pop("out_of_memory", False)
    if ended is not None:
        return found, (ended[0], f"{ended[1]} {stage}")
    if error is not None:
        return found, ("OOM" if out_of_memory else "fail_to_run", error)
    if child.returncode:
        return found, _death(child.returncode, stage, log)
    return found, None


def _watch(child: "subprocess.Popen[bytes]", how: How) -> Failure | None:
    """Waits for a process to end, or says which limit it passed."""
    start = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LOOK_S)
            return None
        if time.monotonic() - start > how.timeout_s:
            return "timeout", f"not done after {how.timeout_s:g} s,"
        if how.memory_gb is not None:
            used = _resident(child.pid)
            if used > how.memory_gb * _GB:
                return "OOM", f"{used / _GB:.1f} GB, of {how.memory_gb:g} allowed,"


def _resident(pid: int) -> int:
    """Bytes of a process and those that it started."""
    psutil = import_psutil()
    total = 0
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def _death(status: int, stage: str, log: Path) -> Failure:
    if status == -signal.SIGKILL:
        return "OOM", f"the process was killed from outside {stage}: probably for its memory"
    if status < 0:
        return "fail_to_run", f"the process died of {signal.Signals(-status).name} {stage}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "fail_to_run", f"exit status {status} {stage}: {' '.join(lines[-1:])[:300]}"


def _told(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        with contextlib.suppress(json.JSONDecodeError):  # the process may have died writing it
            told = json.loads(line)
            notes = [text for text in (found.get("note"), told.get("note")) if text]
            found |= told | ({"note": "; ".join(notes)} if notes else {})
    return found


def _environment(how: How, folder: Path) -> Mapping[str, str]:
    """Caches that are empty in the first process, and those of the first in the second."""
    caches = {
        "DYNAMO_BACKENDS_CACHE": folder / "dynamo_backends",
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
        "TRITON_CACHE_DIR": folder / "triton",
    }
    found = {**children.environment(), **{name: str(path) for name, path in caches.items()}}
    if how.threads is not None:
        found["OMP_NUM_THREADS"] = str(how.threads)
    return found


@contextlib.contextmanager
def _started(
    arguments: list[str], environment: Mapping[str, str], out: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process in a session of its own; it and those that it started do not outlive this."""
    child = subprocess.Popen(
        arguments,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        children.kill(child)
