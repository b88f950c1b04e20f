"""Runs in the processes of a cell whose model answers requests of changing sizes."""

import copy
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends import _torch_private as private
from dynamo_backends import record
from dynamo_backends.bench.accuracy import TOLERANCE, compare_outputs
from dynamo_backends.bench.backends import resolve_compiler
from dynamo_backends.bench.cells import EAGER, BenchConfig, Cell
from dynamo_backends.bench.environment import (
    LoadMonitor,
    peak_memory_bytes,
    synchronize_function,
    wait,
)
from dynamo_backends.bench.measuring import (
    LEAST_ROUNDS,
    Tell,
    count_outside_graphs,
    tell_speedup,
    why_uncompiled,
)
from dynamo_backends.bench.statistics import PAUSE_S, time_candidates
from dynamo_backends.bench.suites.streams import Compile, Stream, StreamCase
from dynamo_backends.bench.workload import DTYPES, cast, tolerance
from dynamo_backends.pipeline import background

Serve = Callable[..., Any]
"""Answers a request."""


def difference(
    stream: Stream,
    eager: Serve,
    served: Serve,
    request: Sequence[Any],
    tolerance: float = TOLERANCE,
) -> str:
    """Returns what is wrong with the answer to a request; empty if it is as accurate as eager's.

    Args:
        stream: Of which it is a request.
        eager: Answers in eager.
        served: What is in question.
        request: Its inputs.
        tolerance: Absolute and relative.
    """
    expected, result = eager(*request), served(*request)
    leaves, others = pytree.tree_leaves(expected), pytree.tree_leaves(result)
    if len(leaves) == len(others) and all(map(torch.equal, leaves, others)):
        return ""
    model = copy.deepcopy(stream.model).double()
    precise = stream.serve(model, lambda function: function)(*widened(request))
    found = compare_outputs(expected, result, precise, tolerance)
    return "" if found.passed else found.detail


def widened(request: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the inputs of a request in float64."""
    found: tuple[Any, ...] = pytree.tree_map_only(Tensor, _widened, tuple(request))
    return found


def _widened(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def seconds(serve: Serve, request: Sequence[Any]) -> float:
    """Returns the latency of one request in seconds."""
    start = time.perf_counter()
    serve(*request)
    return time.perf_counter() - start


def percentile(latencies: Sequence[float], percent: int) -> float:
    """Returns a percentile of the latencies of the answers.

    Args:
        latencies: At least one.
        percent: From 1 to 99.
    """
    if len(latencies) == 1:
        return latencies[0]
    return statistics.quantiles(latencies, n=100, method="inclusive")[percent - 1]


def measure_cold(case: StreamCase, cell: Cell, how: BenchConfig, tell: Tell) -> None:
    """Answers requests with nothing in a cache, compares the answers, and times both if asked.

    Args:
        case: The stream.
        cell: What to measure.
        how: How.
        tell: See `bench.measuring.cold`.
    """
    stream, eager = _begun(case, cell, how, tell)
    with _gradients(stream):
        for request in stream.requests:
            eager(*request)
        tell(peak_eager=peak_memory_bytes(how.device), requests=len(stream.requests))
        again = stream.serve(copy.deepcopy(stream.model), _in_eager)
        if reason := _wrong(stream, eager, again, cell)[1]:
            tell(status="eager_two_runs_differ", reason=reason)
            return
        tell(stage="compile")
        served, uncompiled = _compiled(stream, cell, how, tell, "compile_cold_s")
        if uncompiled:
            tell(status="not_compiled", reason=uncompiled)
            return
        tell(stage="compare")
        wrong, reason = _wrong(stream, eager, served, cell)
        if wrong and stream.tokens:  # which rounding may have changed
            wrong, reason = _wrong_in_float64(stream, cell)
            torch.compiler.reset()
            served, _ = _compiled(stream, cell, how, lambda **_: None, "")
        tell(wrong=wrong)
        if wrong:
            text = f"{wrong} of {len(stream.requests)} answers are wrong: {reason}"
            tell(status="fail_accuracy", reason=text)
            return
        if how.accuracy:
            tell(stage="done")
            return
        gc.collect()
        tell(stage="rounds")
        _rounds(stream, eager, served, how, tell)


def measure_warm(case: StreamCase, cell: Cell, how: BenchConfig, tell: Tell) -> None:
    """Answers requests with what the first process left in caches."""
    stream, _ = _begun(case, cell, how, tell)
    with _gradients(stream):
        tell(stage="compile")
        served, _ = _compiled(stream, cell, how, tell, "compile_warm_s")
        tell(stage="calls", peak_backend=peak_memory_bytes(how.device))
        if cell.backend != EAGER:
            first = stream.requests[0]
            tell(stage="coverage", **count_outside_graphs(lambda: served(*first)))


def _begun(case: StreamCase, cell: Cell, how: BenchConfig, tell: Tell) -> tuple[Stream, Serve]:
    """Returns the stream in the cell's dtype, and eager."""
    stream, dtype = case.make(), DTYPES[cell.dtype]
    stream.model.to(how.device, dtype)
    asked: list[Any] = [cast(request, how.device, dtype) for request in stream.requests]
    stream = dataclasses.replace(stream, requests=asked)
    tell(stage="eager")
    return stream, _waiting(stream.serve(copy.deepcopy(stream.model), _in_eager), how)


def _waiting(serve: Serve, how: BenchConfig) -> Serve:
    """Answers when the device is done."""

    def answer(*request: Any) -> Any:
        result = serve(*request)
        wait(how.device)
        return result

    return serve if how.device == "cpu" else answer


def _in_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _by(backend: str) -> Compile:
    if backend == EAGER:
        return _in_eager
    return lambda function: torch.compile(function, backend=resolve_compiler(backend))


def _gradients(stream: Stream) -> AbstractContextManager[Any]:
    return torch.set_grad_enabled(stream.trains)


def _compiled(
    stream: Stream, cell: Cell, how: BenchConfig, tell: Tell, name: str
) -> tuple[Serve, str]:
    """Returns the compiled model after it has answered all requests twice.

    Returns:
        That; and why nothing was compiled, if so.
    """
    graphs = private.dynamo_counters()["stats"]
    served = _waiting(stream.serve(copy.deepcopy(stream.model), _by(cell.backend)), how)
    with record() as reports:
        first, *others = stream.requests
        took = [seconds(served, first)]
        after_first = graphs["unique_graphs"]
        took += [seconds(served, request) for request in others]
        background.wait_until_idle()
        for request in stream.requests:  # the first calls of programs are compared with eager
            served(*request)
        background.wait_until_idle()
    tell(**{name: took[0]}, stream_cold_s=sum(took))
    if cell.backend == EAGER:
        return served, ""
    breaks = sum(private.dynamo_counters()["graph_break"].values())
    captured = graphs["unique_graphs"]
    tell(graphs=captured, recompilations=captured - after_first, breaks=breaks)
    if reports:
        tell(
            executables=sum(r.executables for r in reports),
            ops_on_backend=sum(r.ops_on_backend for r in reports),
            ops_fallback=sum(r.ops_in_eager for r in reports),
            note="; ".join([reason for r in reports for reason in r.runtime_fallbacks][:1]),
        )
    return served, why_uncompiled(reports, captured)


def _wrong_in_float64(stream: Stream, cell: Cell) -> tuple[int, str]:
    model = copy.deepcopy(stream.model).double()
    expected = stream.serve(copy.deepcopy(model), _in_eager)
    torch.compiler.reset()
    found = stream.serve(model, _by(cell.backend))
    differing = [int((found(*r) != expected(*r)).sum()) for r in map(widened, stream.requests)]
    first = next(filter(None, differing), 0)
    return sum(map(bool, differing)), f"{first} tokens differ in float64"


def _wrong(stream: Stream, eager: Serve, served: Serve, cell: Cell) -> tuple[int, str]:
    """Returns how many answers are wrong, and what is wrong with the first of these."""
    allowed = tolerance(cell.dtype, "training" if stream.trains else "inference")
    found = [difference(stream, eager, served, r, allowed) for r in stream.requests]
    first, *more = next(filter(None, found), "").split("; ")
    others = f"; and {len(more)} more" if more else ""
    return sum(map(bool, found)), first + others


def _rounds(stream: Stream, eager: Serve, served: Serve, how: BenchConfig, tell: Tell) -> None:
    """Rounds in which each answers all requests."""
    latencies: dict[str, list[float]] = {EAGER: [], "backend": []}

    def answering(name: str, serve: Serve) -> Callable[[], None]:
        return lambda: latencies[name].extend(seconds(serve, r) for r in stream.requests)

    with LoadMonitor() as load:
        timings = time_candidates(
            {EAGER: answering(EAGER, eager), "backend": answering("backend", served)},
            how.rounds,
            PAUSE_S,
            warmup=0,
            lead_in=0,
            budget_s=how.patience_s,
            least_rounds=LEAST_ROUNDS,
            synchronize=synchronize_function(how.device),
        )
    tell(
        p50_s=percentile(latencies["backend"], 50),
        p95_s=percentile(latencies["backend"], 95),
        eager_p50_s=percentile(latencies[EAGER], 50),
        eager_p95_s=percentile(latencies[EAGER], 95),
    )
    tell_speedup(timings[EAGER], timings["backend"], load.of_others, tell)
