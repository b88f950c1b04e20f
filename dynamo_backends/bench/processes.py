"""Measures a cell in processes of its own, and says what became of them."""

import signal
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_backends.bench.cells import OF_EAGER, BenchConfig, Cell, Outcome, Status
from dynamo_backends.bench.packages import import_psutil
from dynamo_backends.workers.worker_process import ProcessLostError, WorkerProcess

_STAGES = {
    "load": "while the model was built",
    "eager": "while eager ran",
    "reference": "while eager ran in float64",
    "compile": "while it was compiled and called for the first time",
    "compare": "while it was called",
    "rounds": "while it was timed",
    "calls": "while it was called",
    "coverage": "while it was called",
    "done": "while its process ended",
}
_GB = 10**9


def measure(cell: Cell, how: BenchConfig) -> Outcome:
    """Measures a cell: once from cold and, if that passes, once from warm if times are asked for.

    Whatever the processes do, the outcome says it: only an interruption of this one is raised, and
    ends them.
    """
    if how.memory_gb is not None:
        import_psutil()
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
    cell: Cell, how: BenchConfig, kind: str, folder: Path
) -> tuple[dict[str, Any], Failure | None]:
    """Runs one process; returns what it told, and how it failed."""
    found: dict[str, Any] = {}
    deadline = time.monotonic() + how.timeout_s

    def hear(told: dict[str, Any]) -> float:
        notes = [text for text in (found.get("note"), told.get("note")) if text]
        found.update(told | ({"note": "; ".join(notes)} if notes else {}))
        return max(deadline - time.monotonic(), 0.0)

    process = WorkerProcess(
        ("-m", "dynamo_backends.bench.child"),
        output=folder / f"{kind}.log",
        variables=_variables(how, folder),
        memory_bytes=None if how.memory_gb is None else how.memory_gb * _GB,
    )
    request = {"cell": asdict(cell), "how": asdict(how), "kind": kind}
    try:
        with process:
            answer = process.ask(request, how.timeout_s, hear)
            if "error" in answer:
                return found, ("OOM" if answer["out_of_memory"] else "fail_to_run", answer["error"])
            process.finish(max(deadline - time.monotonic(), 0.0))
    except ProcessLostError as lost:
        return found, _death(lost, how, _STAGES.get(found.get("stage", "load"), ""))
    return found, None


def _death(lost: ProcessLostError, how: BenchConfig, stage: str) -> Failure:
    if lost.limit == "time":
        return "timeout", f"did not finish within {how.timeout_s:g} s, {stage}"
    if lost.limit == "memory":
        return "OOM", f"{lost}, {stage}"
    status = lost.status or 0
    if status == -signal.SIGKILL:
        return "OOM", f"the process was killed by SIGKILL {stage}, probably because memory ran out"
    if status < 0:
        return "fail_to_run", f"the process died of {signal.Signals(-status).name} {stage}"
    return "fail_to_run", f"exit status {status} {stage}: {lost.last_line[:300]}"


def _variables(how: BenchConfig, folder: Path) -> dict[str, str]:
    """Caches that are empty in the first process, and those of the first in the second."""
    caches = {
        "DYNAMO_BACKENDS_CACHE": folder / "dynamo_backends",
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
        "TRITON_CACHE_DIR": folder / "triton",
    }
    found = {name: str(path) for name, path in caches.items()}
    if how.threads is not None:
        found["OMP_NUM_THREADS"] = str(how.threads)
    return found
