"""Runs in the processes of a cell: measures a backend from cold, and again from warm."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dynamo_backends import _torch_private as private
from dynamo_backends import coverage, record
from dynamo_backends.bench.accuracy import compare_outputs
from dynamo_backends.bench.cells import EAGER, BenchConfig, Cell, Speedup
from dynamo_backends.bench.environment import (
    LoadMonitor,
    peak_memory_bytes,
    synchronize_function,
    wait,
)
from dynamo_backends.bench.exports import is_export
from dynamo_backends.bench.statistics import PAUSE_S, p_of_pairs, time_candidates
from dynamo_backends.bench.suites.case import ModelCase
from dynamo_backends.bench.workload import DTYPES, ModelWorkload, Runner, results, timed, tolerance
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.workers.statistics import Timing

_SAMPLE_S = 0.01  # a sample of shorter calls consists of several
_MOST_REPEATS = 20
LEAST_ROUNDS = 8  # of fewer no difference is significant for many models together
_SLOW_S = 1.0  # such calls are not warmed up for every sample
_CALLS = 3  # of a compiled model before its results are looked at: some backends record calls

Tell = Callable[..., None]
"""Notes values that are known, by the names of `Outcome`, and the stage that begins."""


def measure_cold(case: ModelCase, cell: Cell, how: BenchConfig, tell: Tell) -> None:
    """Compiles with nothing in a cache, compares with eager and float64, and times both if asked.

    Args:
        case: The model.
        cell: What to measure.
        how: How.
        tell: Told what is found as soon as it is known: the process may not live to the end.
    """
    work = _load(case, cell, how)
    tell(stage="eager")
    work.eager()()
    tell(peak_eager=peak_memory_bytes(how.device))
    expected = results(work.eager(), work.calls)
    again = results(work.eager(), work.calls)
    limit = tolerance(cell.dtype, cell.mode)
    differing = compare_outputs(expected, again, expected, limit)
    if not differing.passed:
        tell(status="eager_two_runs_differ", reason=differing.detail)
        return
    del again
    tell(stage="reference")
    precise, note = _precise(work, expected)
    allowed = work.allowed(expected)
    tell(note=note)
    run = compile_and_check(work, cell, how, tell, Expected(expected, precise, allowed))
    if run is None:
        return
    if how.accuracy:
        tell(stage="done")
        return
    del expected, precise, allowed
    gc.collect()
    tell(stage="rounds")
    with LoadMonitor() as load:
        timings = time_rounds({EAGER: timed(work.eager()), "backend": timed(run)}, how)
    tell_speedup(timings[EAGER], timings["backend"], load.of_others, tell)


class Expected(NamedTuple):
    """The results with which a backend's are compared (see `accuracy.compare_outputs`)."""

    eager: Any
    precise: Any
    allowed: Any


def compile_and_check(
    work: ModelWorkload, cell: Cell, how: BenchConfig, tell: Tell, expected: Expected
) -> Runner | None:
    """Compiles a model; returns its runner, or None if results are wrong.

    Args:
        work: The model.
        cell: The backend.
        how: How it is measured.
        tell: Told what is found, and why nothing is returned.
        expected: Right results.
    """
    tell(stage="compile")
    run, uncompiled = _compile(work, cell, how, tell, "compile_cold_s")
    if uncompiled:
        tell(status="not_compiled", reason=uncompiled)
        return None
    tell(stage="compare")
    found = results(run, max(_CALLS, work.calls) - work.calls_to_compile)
    limit = tolerance(cell.dtype, cell.mode)
    accuracy = compare_outputs(expected.eager, found, expected.precise, limit, expected.allowed)
    tell(max_rel=accuracy.max_rel)
    if not accuracy.passed:
        tell(status="fail_accuracy", reason=accuracy.detail)
        return None
    return run


def measure_warm(case: ModelCase, cell: Cell, how: BenchConfig, tell: Tell) -> None:
    """Compiles with what the first process left in caches, and counts what runs in eager."""
    work = _load(case, cell, how)
    tell(stage="compile")
    run, _ = _compile(work, cell, how, tell, "compile_warm_s")
    tell(stage="calls")
    for _ in range(2):
        run()
    tell(peak_backend=peak_memory_bytes(how.device))
    if cell.backend == EAGER or cell.mode == "step" or is_export(cell.backend):
        return
    tell(stage="coverage", **count_outside_graphs(run))


def count_outside_graphs(run: Runner) -> dict[str, Any]:
    """Counts operators, and their time, that run in eager outside of graphs."""
    try:
        with coverage() as found:
            run()
            found.restart()
            run()
    except Exception as error:  # the backend has done its work
        return {"note": f"the work outside of graphs could not be measured: {brief_error(error)}"}
    return {"ops_outside": found.ops_in_eager, "seconds_outside": found.seconds_in_eager}


def _load(case: ModelCase, cell: Cell, how: BenchConfig) -> ModelWorkload:
    if "rnn" in case.tags:
        torch._dynamo.config.allow_rnn = True
    return ModelWorkload(case, cell.mode, DTYPES[cell.dtype], how.device)


def _precise(work: ModelWorkload, expected: Any) -> tuple[Any, str]:
    try:
        return work.precise(), ""
    except Exception as error:  # models that name float32 themselves
        return expected, (
            f"compared with eager in the model's dtype only: float64 raised {brief_error(error)}"
        )


def _compile(
    work: ModelWorkload, cell: Cell, how: BenchConfig, tell: Tell, name: str
) -> tuple[Runner, str]:
    """Returns the compiled model, called until it is compiled; and why nothing of it was, if so."""
    if cell.backend == EAGER:
        run = work.eager()
        run()
        return run, ""
    counters = private.dynamo_counters()
    with record() as reports:
        start = time.perf_counter()
        torch.manual_seed(0)
        run = work.compiled(cell.backend)
        for _ in range(work.calls_to_compile):
            run()
        wait(how.device)
        seconds = time.perf_counter() - start
    tell(**{name: seconds})
    if is_export(cell.backend):
        return run, ""
    if cell.mode != "step" or counters["stats"]["unique_graphs"]:
        tell(
            graphs=counters["stats"]["unique_graphs"], breaks=sum(counters["graph_break"].values())
        )
    if reports:
        replaced = [reason for r in reports for reason in r.runtime_fallbacks]
        tell(
            ops_on_backend=sum(r.ops_on_backend for r in reports),
            ops_fallback=sum(r.ops_in_eager for r in reports),
            chosen=tuple(r.chosen for r in reports if r.chosen),
            note="; ".join(replaced[:1]),
        )
    by_step_compiler = cell.mode == "step" and not counters["stats"]["unique_graphs"]
    graphs = 1 if by_step_compiler else counters["stats"]["unique_graphs"]
    return run, why_uncompiled(reports, graphs)


def why_uncompiled(reports: Sequence[GraphReport], graphs: int) -> str:
    """Returns why no operator runs on the backend; empty: some do, or autotune has chosen eager.

    Args:
        reports: Reports of all graphs, if the backend is of this package.
        graphs: That Dynamo captured.
    """
    if any(r.ops_on_backend or r.ops_on_inductor or r.chosen for r in reports):
        return ""
    if not reports:
        return "" if graphs else "Dynamo captured no graph: all of the model runs in eager"
    reasons = [r.reverted for r in reports if r.reverted]
    reasons += [f"{f.op}: {f.reason}" for r in reports for f in r.fallbacks]
    return next(iter(reasons), "the graphs have no operators")


def time_rounds(steps: dict[str, Runner], how: BenchConfig) -> dict[str, Timing]:
    """Times eager and the backend alternately, in the same rounds.

    Args:
        steps: By name, eager among them.
        how: How they are measured.
    """
    call_s = _once(steps[EAGER], how.device)
    slow = call_s > _SLOW_S
    return time_candidates(
        steps,
        how.rounds,
        PAUSE_S,
        warmup=0 if slow else 2,
        lead_in=0 if slow else 1,
        repeat=max(1, min(_MOST_REPEATS, int(_SAMPLE_S / max(call_s, 1e-7)))),
        budget_s=how.patience_s,
        least_rounds=LEAST_ROUNDS,
        baseline=EAGER,
        synchronize=synchronize_function(how.device),
    )


def tell_speedup(eager: Timing, backend: Timing, of_others: float | None, tell: Tell) -> None:
    """Tells what came of the rounds, the last thing that is measured."""
    ratio, p = backend.speedup, p_of_pairs(eager.samples, backend.samples)
    tell(
        eager_s=eager.samples,
        backend_s=backend.samples,
        speedup=vars(Speedup(ratio.value, ratio.low, ratio.high, p)),
        load=of_others,
        stage="done",
    )


def _once(step: Runner, device: str) -> float:
    """Seconds of a call that is not the first."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - start)
        if times[-1] > _SLOW_S:
            break
    return statistics.median(times)
