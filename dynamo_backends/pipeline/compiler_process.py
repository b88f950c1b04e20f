"""Compiles blocks in another process, so that calls do not wait for the GIL.

Python that compiles would take turns with that of the calls; in a process of its own it does not,
and can have a lower priority. Given is one block after all passes, and what comes back are the
bytes that `SavesExecutables.load` takes. What the other process cannot do is done here.
"""

import base64
import logging
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph, Input
from dynamo_backends.graph.precision import float32_matmul_precision
from dynamo_backends.graph.symbolic_sizes import SIZES, STRIDES
from dynamo_backends.interface import errors, protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import CompileError, TrialNeededError, brief_error
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.plan import Plan
from dynamo_backends.interface.registry import is_loadable_by_name
from dynamo_backends.interface.report import Kind
from dynamo_backends.runtime.compile_journal import ENDED, CompileJournalEntry, CompileOutcome
from dynamo_backends.runtime.verdicts import forbid_trials
from dynamo_backends.workers.worker_process import (
    ProcessLostError,
    WorkerProcess,
    child_environment,
)

log = logging.getLogger("dynamo_backends")

NICE = 10
"""By how much calls go before the other process."""

_COMMAND = ("-m", "dynamo_backends.pipeline.compiler_worker")
_START_S = 600.0  # for the imports, on a busy machine
_KEPT = frozenset({"val", SIZES, STRIDES})

Task = Literal["plan", "compile"]


@dataclass(frozen=True)
class CompileJob:
    """A request to the compiler process.

    Attributes:
        task: "plan" decides about the calls; "compile" makes an executable to be loaded.
        backend: Name of the backend.
        options: Options of the backend.
        graph: The packed module, after all passes.
        kind: See `Graph`.
        inputs: See `Graph`.
        plan: What is decomposed.
        cache_key: The backend's here: there it must be the same.
        threads: torch's number of threads.
        precision: See `float32_matmul_precision`.
        environment: Variables for the other process.
    """

    task: Task
    backend: str
    options: Options
    graph: bytes
    kind: Kind
    inputs: tuple[Input, ...]
    plan: Plan
    cache_key: str
    threads: int
    precision: str
    environment: Mapping[str, str]


class CompilerLostError(CompileError):
    """The compiler process ended during a compilation."""


class CompilerProcess:
    """The compiler process; started on first use, and again after a crash."""

    def __init__(self) -> None:
        self.is_unusable = False
        self._process = WorkerProcess(_COMMAND, niceness=NICE)
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._process.running

    def end(self) -> None:
        """Ends the process; the next job starts another."""
        self._process.end()

    def disown(self) -> None:
        """Forgets the parent's process, in a forked child."""
        self._process.disown()

    def run_job(self, job: CompileJob) -> dict[str, Any] | None:
        """Runs a job and returns its answer; None if that process cannot do it.

        Raises:
            DynamoBackendsError: As the backend did there; or its compiler crashed.
        """
        with self._lock:
            if self.is_unusable or not (self._process.running or self._started()):
                return None
            try:
                answer = self._process.ask({"job": _text(pickle.dumps(job))}, None)
            except ProcessLostError as lost:
                raise CompilerLostError(f"the compiler process was lost: {lost}") from lost
        if "unable" in answer:
            log.debug(
                "a block is compiled in this process instead of the compiler process: %s",
                answer["unable"],
            )
            return None
        if "raised" in answer:
            name, arguments = answer["raised"]
            raise getattr(errors, name)(*arguments)
        return answer

    def _started(self) -> bool:
        try:
            self._process.ask({}, _START_S)
        except (ProcessLostError, OSError) as error:
            self.is_unusable = True
            log.info("the compiler process could not be started: %s", error)
        return not self.is_unusable


process = CompilerProcess()
"""The one of this process."""


def forget_parent_process() -> None:
    """Replaces the parent's compiler process, in a forked child."""
    global process
    process.disown()
    process = CompilerProcess()


def plan_in_subprocess(backend: Backend, graph: Graph, options: Options) -> Plan:
    """Plans a graph as `Backend.plan`, with trials in the compiler process."""
    try:
        with forbid_trials():
            return backend.plan(graph, options)
    except TrialNeededError:
        pass
    try:
        answer = _done("plan", backend, options, Plan(), graph)
    except CompileError as error:
        return Plan(dict.fromkeys((node.name for node in graph.calls), str(error)))
    return backend.plan(graph, options) if answer is None else Plan(**answer["plan"])


def compile_in_subprocess(
    backend: Backend,
    options: Options,
    plan: Plan,
    graph: Graph,
    make: Callable[[], Executable],
    came: dict[str, bytes],
) -> Executable:
    """Compiles a block in the compiler process if possible, else in this one.

    Args:
        backend: What compiles it.
        options: Options of the backend.
        plan: Plan of a graph that the block is a part of.
        graph: The block; not changed.
        make: Compiles it in this process.
        came: Gets what the other process has dumped.

    Raises:
        DynamoBackendsError: It cannot be compiled, or the compiler crashed.
    """
    answer = _done("compile", backend, options, plan, graph)
    if answer is None:
        return make()
    came.update({name: base64.b64decode(text) for name, text in answer["parts"].items()})
    return protocols.load_executable(backend, dict(came), graph.copy(), options)


def compile_with_crash_journal(
    backend: Backend,
    options: Options,
    plan: Plan,
    graph: Graph,
    mark: str,
    make: Callable[[], Executable],
    came: dict[str, bytes],
) -> Executable:
    """Compiles a block here, or in the compiler process if it crashed one before.

    What has is compiled in another process, and refused if that ends, too.

    Args:
        backend: See `compile_in_subprocess`.
        options: Likewise; without a disk cache nothing is known of other processes.
        plan: Likewise.
        graph: Likewise.
        mark: What the block is called in the disk cache.
        make: See `compile_in_subprocess`.
        came: Likewise.

    Raises:
        DynamoBackendsError: It cannot be compiled, or ends the process.
    """
    if not options.cache or not backend.packages:  # there is no vendor
        return make()
    journal = CompileJournalEntry(f"{backend.name} {backend.versions()} {mark}")
    outcome = journal.outcome
    if outcome is CompileOutcome.UNKNOWN:
        with journal.note_running():
            return make()

    def refuse() -> Executable:
        raise CompileError(ENDED)

    if outcome is CompileOutcome.CRASHED:
        refuse()
    log.info(
        "%s: a block is compiled in the compiler process, because an earlier "
        "compilation crashed its process",
        backend.name,
    )
    try:
        made = compile_in_subprocess(backend, options, plan, graph, refuse, came)
    except CompilerLostError as error:
        journal.note_crash()
        raise CompileError(ENDED) from error
    journal.clear()
    return made


def _done(
    task: Task, backend: Backend, options: Options, plan: Plan, graph: Graph
) -> dict[str, Any] | None:
    """Returns what came of a job; None: it is to be done in this process."""
    key = protocols.cache_key(backend, options)
    if key is None or process.is_unusable:
        return None
    if not is_loadable_by_name(backend) or not _is_on_cpu(graph):
        return None
    try:
        packed = _packed(graph)
    except Exception as error:  # whatever a target answers to pickling
        log.debug(
            "a block is compiled in this process instead of the compiler process: %s",
            brief_error(error),
        )
        return None
    inside = {node.name for node in graph.calls}
    decomposed = frozenset(name for name in plan.decomposed if name in inside)
    job = CompileJob(
        task,
        backend.name,
        options,
        packed,
        graph.kind,
        graph.inputs,
        Plan(decomposed=decomposed),
        key,
        torch.get_num_threads(),
        float32_matmul_precision(),
        child_environment(),
    )
    return process.run_job(job)


def _packed(graph: Graph) -> bytes:
    from dynamo_backends._torch_private.precompile import pack

    return pack(graph.module, _KEPT)


def _is_on_cpu(graph: Graph) -> bool:
    """Returns whether a graph is for the CPU: other devices' memory would be taken twice."""
    values = [node.meta.get("val") for node in (*graph.placeholders, *graph.calls)]
    tensors = [t for v in values for t in (v if isinstance(v, list | tuple) else (v,))]
    return all(t.device.type == "cpu" for t in tensors if isinstance(t, Tensor))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def encode_parts(parts: Mapping[str, bytes]) -> dict[str, Any]:
    """Encodes the bytes of `Executable.dump` as a JSON answer."""
    return {"parts": {name: _text(part) for name, part in parts.items()}}


def encode_plan(plan: Plan) -> dict[str, Any]:
    """Encodes a plan as a JSON answer."""
    return {"plan": {"eager": dict(plan.eager), "decomposed": sorted(plan.decomposed)}}


def encode_error(error: Exception) -> dict[str, Any]:
    """Encodes an error as a JSON answer; unknown classes become `CompileError`."""
    if isinstance(error, errors.LoweringError):
        arguments = [error.node_name, error.op, error.reason]
    elif isinstance(error, errors.NotPaddedError):
        arguments = [error.op, error.reason]
    else:
        known = isinstance(error, errors.DynamoBackendsError)
        return {"raised": ["CompileError", [str(error) if known else brief_error(error)]]}
    return {"raised": [type(error).__name__, arguments]}
