"""Checks that a candidate does what eager does: values, types, memory, mutation.

Random numbers: each trial starts from the same state of torch's generators, so a candidate that
draws other numbers than eager is excluded. Those of this package draw torch's numbers, and
Inductor is told to.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.autotune.trial_inputs import MutationDetector, TrialInputs
from dynamo_backends.int8.tolerance import Scores, Tolerance
from dynamo_backends.verify import describe_difference, restore_rng, snapshot_rng, widen_to_float64
from dynamo_backends.verify.comparator import REDUCED_TOLERANCE, relative_error
from dynamo_backends.verify.mismatch import (
    describe_layout_mismatch,
    describe_nonfinite_mismatch,
    find_output_aliases,
    is_inexact,
    storage_address,
)
from dynamo_backends.workers.race import Run

log = logging.getLogger("dynamo_backends")


@dataclass(frozen=True)
class Verdict:
    """The result of verifying a candidate: what is wrong, and its error.

    Attributes:
        wrong: What is wrong, in words; empty if nothing is.
        error: Largest root mean square error of an output against float64, relative to the size
            of that output; None if the outputs are not of the same kind.
        first_s: Seconds of the first call, in which many candidates still compile.
    """

    wrong: str
    error: float | None = None
    first_s: float = 0.0

    @property
    def is_right(self) -> bool:
        """Returns whether the candidate passed."""
        return not self.wrong


class VerificationCase:
    """One set of inputs with eager's results, which candidates are compared with.

    Args:
        arguments: The inputs.
        original: Eager.
        precise: Eager in float64; None if it cannot be computed so.
        promised: Strides of the outputs that Dynamo promises, besides eager's own.
        outputs: How many of the results are outputs; those after them are gradients, which may have
            any strides: autograd gives a parameter's its own. None: all are outputs.
        draws: Whether random numbers may be drawn. If not, torch's generators are let alone, which
            are those of the program's other threads, too.
        where: What of its inputs a verdict is to mention.
        clock: Tells seconds.
    """

    def __init__(
        self,
        arguments: TrialInputs,
        original: Run,
        precise: Run | None,
        promised: Sequence[Sequence[int] | None] = (),
        outputs: int | None = None,
        draws: bool = True,
        where: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.where = where
        self._clock = clock
        self._arguments = arguments
        self._original = original
        self._rng = snapshot_rng() if draws else None
        self._promised = promised
        self._outputs = outputs
        args = arguments.make_call_inputs()
        self._expected = list(original(list(args)))
        self._aliases = find_output_aliases(args, self._expected)
        self._expected += [args[i] for i in sorted(arguments.mutated)]
        self._precise = self._expected
        if precise is not None:
            self._restore_rng()
            self._precise = self._in_float64(precise) or self._expected
        self._restore_rng()

    def _restore_rng(self) -> None:
        if self._rng is not None:
            restore_rng(self._rng)

    def _in_float64(self, precise: Run) -> list[Any] | None:
        args = [_widen(a) for a in self._arguments.make_call_inputs()]
        try:
            results = list(precise(list(args)))
        except Exception:
            return None  # such as a cast to float32 in the middle: compared with eager alone
        return results + [args[i] for i in sorted(self._arguments.mutated)]

    @functools.cached_property
    def _expected_in_bfloat16(self) -> list[Any]:
        """Returns eager's results under autocast, or without it if that fails."""
        args = self._arguments.make_call_inputs()
        self._restore_rng()
        try:
            with autocast_bfloat16():
                results = list(self._original(list(args)))
        except Exception:
            log.debug("eager raised an error under autocast", exc_info=True)
            return self._expected
        results += [args[i] for i in sorted(self._arguments.mutated)]
        return [
            r.to(e.dtype) if isinstance(e, Tensor) and is_inexact(e) else e
            for e, r in zip(self._expected, results, strict=True)
        ]

    @property
    def eager_error(self) -> float:
        """Returns eager's relative error against float64; 0 if that is not known."""
        return relative_error(self._precise, self._expected)

    def verify_candidate(
        self,
        run: Run,
        reduced: bool = False,
        calls: int = 2,
        tolerance: Tolerance | None = None,
    ) -> Verdict:
        """Calls a candidate several times and compares its results with eager's.

        Args:
            run: The candidate.
            reduced: Whether results may be as inexact as eager's under autocast to bfloat16.
            calls: How often it is called. From each call to the next, what is no floating-point
                number must stay the same; the others must be accurate each time.
            tolerance: What is admitted of values in the place of that.
        """
        verdicts: list[Verdict] = []
        before = snapshot_rng() if self._rng is not None else None
        alive: list[Any] = []
        try:
            for _ in range(calls):
                self._restore_rng()
                verdicts.append(self._call(run, reduced, alive, tolerance))
                if not verdicts[-1].is_right:
                    break
        finally:
            if before is not None:
                restore_rng(before)
        return _together(verdicts)

    def _call(
        self, run: Run, reduced: bool, alive: list[Any], tolerance: Tolerance | None
    ) -> Verdict:
        args = self._arguments.make_call_inputs()
        watched = {
            i: a
            for i, a in enumerate(args)
            if isinstance(a, Tensor) and i not in self._arguments.uncopied
        }
        watch = MutationDetector(watched)
        start = self._clock()
        try:
            results = list(run(list(args)))
        finally:
            seconds = self._clock() - start
            spoilt = self._arguments.weights.mutated_positions()
            self._arguments.weights.restore()
        written = set(watch.mutated_positions()) - self._touched(args)
        if spoilt or written:
            return Verdict(
                f"it writes to input {min({*spoilt, *written})}, which eager does not write to"
            )
        wrong = self._shape(args, results) or _reused(args, results, alive)
        alive += results
        results += [args[i] for i in sorted(self._arguments.mutated)]
        if wrong:
            return Verdict(wrong, first_s=seconds)
        error = relative_error(self._precise, results)
        if tolerance is None:
            return Verdict(self._values(results, reduced), error, seconds)
        scores = Scores(tolerance)
        scores.add(self._expected, results)
        return Verdict(scores.wrong, error, seconds)

    def _touched(self, args: Sequence[Any]) -> set[int]:
        """Returns the inputs that share memory with those that eager mutates."""
        places = {storage_address(args[i]) for i in self._arguments.mutated}
        return {i for i, a in enumerate(args) if storage_address(a) in places}

    def _shape(self, args: Sequence[Any], results: Sequence[Any]) -> str:
        expected = self._expected[: len(self._expected) - len(self._arguments.mutated)]
        if len(results) != len(expected):
            return f"{len(results)} outputs and gradients instead of {len(expected)}"
        for i, (e, r) in enumerate(zip(expected, results, strict=True)):
            wrong = describe_layout_mismatch(e, r, self._admitted_strides(i, r))
            if wrong:
                return f"output {i} {wrong}"
        if find_output_aliases(args, results) != self._aliases:
            return "its outputs share memory with other tensors than eager's do"
        return ""

    def _admitted_strides(self, number: int, result: Any) -> Sequence[int] | None:
        """Returns the strides that a result may have besides eager's."""
        if self._outputs is not None and number >= self._outputs:
            return result.stride() if isinstance(result, Tensor) else None
        return self._promised[number] if number < len(self._promised) else None

    def _values(self, results: Sequence[Any], reduced: bool) -> str:
        for i, (e, r) in enumerate(zip(self._expected, results, strict=True)):
            pattern = describe_nonfinite_mismatch(e, r)
            if pattern:
                return f"output {i} {pattern}"
        expected = self._expected_in_bfloat16 if reduced else self._expected
        wrong = describe_difference(expected, results, self._precise)
        if reduced and not wrong:
            error = relative_error(self._precise, results)
            if error > REDUCED_TOLERANCE:
                wrong = f"a relative error of {error:.1e} is too large even for bfloat16"
        return wrong or ""


def verify_on_cases(
    trials: Sequence[VerificationCase],
    run: Run,
    reduced: bool = False,
    tolerance: Tolerance | None = None,
) -> Verdict:
    """Verifies a candidate on all cases: twice on real inputs, once on the others.

    Args:
        trials: The first one is on the real inputs.
        run: The candidate.
        reduced: See `Trial.verify_candidate`.
        tolerance: See `Trial.verify_candidate`. Held-out batches stand in for the other trials
            then: what a
            user admits is meant for real inputs.
    """
    verdicts: list[Verdict] = []
    for number, trial in enumerate(trials[:1] if tolerance is not None else trials):
        verdicts.append(trial.verify_candidate(run, reduced, 1 if number else 2, tolerance))
        if not verdicts[-1].is_right:
            verdicts[-1] = replace(verdicts[-1], wrong=verdicts[-1].wrong + trial.where)
            break
    return _together(verdicts)


def _together(verdicts: Sequence[Verdict]) -> Verdict:
    """Merges verdicts: the last reason, the largest error, the first call's time."""
    worst = max((v.error for v in verdicts if v.error is not None), default=None)
    return Verdict(verdicts[-1].wrong, worst, verdicts[0].first_s)


def _reused(args: Sequence[Any], results: Sequence[Any], alive: Sequence[Any]) -> str:
    """Returns whether results overwrite those of an earlier call."""
    inputs = {storage_address(a) for a in args}
    earlier = {storage_address(r) for r in alive} - inputs - {None}
    if any(storage_address(r) in earlier for r in results):
        return "its results overwrite those of the previous call"
    return ""


def autocast_bfloat16() -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager for autocast to bfloat16, on CUDA if available, else CPU."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(kind, dtype=torch.bfloat16)


def _widen(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    wide = widen_to_float64(value.detach())
    return wide.requires_grad_(value.requires_grad)
