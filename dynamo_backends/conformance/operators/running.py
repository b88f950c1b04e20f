"""Drives PyTorch's own operator database through a backend and judges every result."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dynamo_backends._torch_private.testing import OpInfo
from dynamo_backends.conformance.operators import database
from dynamo_backends.conformance.operators.calls import (
    Call,
    dense,
    describe_mismatch,
    draws,
    shapes,
)
from dynamo_backends.conformance.operators.differences import declared, mask_declared_differences
from dynamo_backends.conformance.operators.extremes import variants
from dynamo_backends.conformance.outcomes import Outcome, how_it_ended
from dynamo_backends.conformance.subject import OPERATORS, compiler_of
from dynamo_backends.interface.errors import brief_error, first_line
from dynamo_backends.interface.logs import silence_loggers
from dynamo_backends.interface.report import GraphReport, record

NOISY = ("dynamo_backends", "torch._subclasses.fake_tensor")

TOGETHER = 12
"""Samples that are compiled as one graph, for as long as nothing is amiss."""


def run(
    op: OpInfo,
    dtype: torch.dtype,
    backend: str,
    limit: int | None = None,
    extremes: bool = False,
) -> Outcome:
    """Runs an operator's samples.

    Args:
        op: From `op_db`.
        dtype: Dtype of the inputs.
        backend: Name of the backend.
        limit: Largest number of samples, spread over all of them.
        extremes: Each with extreme values in its tensors.
    """
    outcome = Outcome(database.full_name(op), database.name_of(dtype))
    compiler = compiler_of(backend, **OPERATORS)
    torch.manual_seed(0)
    with warnings.catch_warnings(), silence_loggers(*NOISY), torch.no_grad():
        warnings.simplefilter("ignore")
        samples = database.choose(list(op.sample_inputs("cpu", dtype, requires_grad=False)), limit)
        if extremes and database.takes_extremes(op, dtype):
            accepted = functools.partial(is_accepted, op)
            checks = op.name not in database.UNCHECKED
            planted = variants(samples, accepted, database.divides(op), checks)
            samples = [database.with_ascending_bounds(op, sample) for sample in planted]
        size = group_size(op)
        for start in range(0, len(samples), size):
            group = samples[start : start + size]
            if not _native_together(Call(op, group, extremes), compiler, outcome):
                calls = [Call(op, [sample], extremes) for sample in group]
                _run_one_by_one(calls, compiler, outcome, backend)
            if outcome.failed:
                break
    torch._dynamo.reset()
    return outcome


def broke_down(op: OpInfo, dtype: torch.dtype, exit_code: int) -> Outcome:
    """Returns the outcome of an operator during which the process ended."""
    found = Outcome(database.full_name(op), database.name_of(dtype), 1)
    return found.fail("crash", how_it_ended(exit_code))


def is_accepted(op: OpInfo, sample: Any) -> bool:
    """Returns whether eager takes a sample."""
    return bool(Call(op, [sample]).samples)


def group_size(op: OpInfo) -> int:
    """Returns how many samples are compiled together."""
    return 1 if op.name in database.INDICES_ALONG else TOGETHER


def _native_together(call: Call, compiler: Any, outcome: Outcome) -> bool:
    """Returns whether samples compiled as one graph are right and run whole on the backend."""
    if not call.samples:
        return True
    if len(call.samples) == 1:
        return False
    with record() as reports:
        try:
            results = call.compiled(compiler, fullgraph=True)
        except Exception:
            return False
    if any(r.fallbacks or r.runtime_fallbacks for r in reports):
        return False
    if describe_mismatch(call, call.eager(), results) is not None:
        return False
    outcome.samples += len(call.samples)
    outcome.settle()
    return True


def _run_one_by_one(calls: Sequence[Call], compiler: Any, outcome: Outcome, backend: str) -> None:
    for call in calls:
        _run_sample(call, compiler, outcome, backend)
        if outcome.failed:
            break


def _run_sample(call: Call, compiler: Any, outcome: Outcome, backend: str) -> None:
    if not call.samples:
        return
    expected = call.eager()
    outcome.samples += 1
    with record() as reports:
        try:
            results = _compile_sample(call, compiler, outcome)
        except Exception as error:
            torchs = _fails_in_torch(call, fullgraph=False)
            outcome.fail("torch" if torchs else "raises", brief_error(error))
            return
    wrong = describe_mismatch(call, expected, results)
    if wrong is not None and not (
        _is_declared(call, expected, results, outcome, backend)
        # Dynamo itself rewrote the operator into a less exact form.
        or describe_mismatch(call, call.compiled("aot_eager"), results) is None
    ):
        if draws(call) and shapes(results) == shapes(expected):
            outcome.fail("random", "random numbers are not eager's")
            return
        outcome.fail("wrong", f"{wrong} ({database.describe(call.samples[0])})")
        return
    note_fallbacks(outcome, reports)


def _is_declared(
    call: Call, expected: list[Any], results: list[Any], outcome: Outcome, backend: str
) -> bool:
    """Returns whether results are right but for what is declared, which is noted."""
    rows = declared(backend, outcome.name, call.flat)
    right = mask_declared_differences(rows, dense(expected), dense(results))
    if not rows or describe_mismatch(call, expected, right) is not None:
        return False
    outcome.declared = sorted({*outcome.declared, *(row.bullet for row in rows)})
    return True


def note_fallbacks(outcome: Outcome, reports: Sequence[GraphReport]) -> None:
    """Adds what ran in eager to an outcome that is right."""
    for report in reports:
        for fallback in report.fallbacks:
            outcome.reasons[f"{fallback.op}: {fallback.reason}"] += 1
        for reason in report.runtime_fallbacks:
            outcome.reasons[reason] += 1
    outcome.settle()


def _compile_sample(call: Call, compiler: Any, outcome: Outcome) -> list[Any]:
    """Compiles a sample in one graph; in parts, with a note, if Dynamo cannot."""
    try:
        return call.compiled(compiler, fullgraph=True)
    except Exception as error:
        if not _fails_in_torch(call, fullgraph=True):
            raise
        outcome.reasons[f"Dynamo does not capture it whole: {first_line(error)}"] += 1
    return call.compiled(compiler)


def _fails_in_torch(call: Call, fullgraph: bool) -> bool:
    try:
        call.compiled("aot_eager", fullgraph=fullgraph)
    except Exception:
        return True
    return False
