"""A captured graph in int8: calibrated and proven before it serves, and whenever weights changed.

The first call, and the first one after weights have changed, goes so: blocks see the batches that
calibrate, in eager; they are quantized; results on the batches that were held out are compared with
those of eager in float32, by what the user admits; so is the call itself. What is not admitted runs
in eager from then on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.int8.calibration import split
from dynamo_backends.int8.executable import STATE, quantizing_for_proof, recording
from dynamo_backends.int8.options import CALIBRATED, Int8Options
from dynamo_backends.int8.tolerance import Scores, Tolerance
from dynamo_backends.interface.errors import VerificationError
from dynamo_backends.interface.report import GraphReport, is_trial_thread
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.runtime.weight_binding import ASK_AGAIN, WASTED
from dynamo_backends.verify.reference import restore_rng, snapshot_rng

Batch = dict[int, Tensor]
"""Inputs of a graph by position; the others are weights."""

IN_FLOAT = (0.0, 0.1, 0.25)
"""Parts of a block's products that stay in float32, from the first one on, as long as results are
not accurate enough: what the first layers lose all others carry on."""


class ProvenGraph:
    """The function that Dynamo calls in place of a graph that is computed in int8.

    Args:
        compiled: The graph, its blocks to be quantized.
        captured: The graph as Dynamo captured it.
        batches: All of calibration.
        options: Options of the backend.
        reports: Reports of the graph.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        captured: fx.GraphModule,
        batches: Sequence[Batch],
        options: Int8Options,
        reports: Sequence[GraphReport],
    ):
        assert options.tolerance is not None
        self._compiled = compiled
        self._eager: Callable[..., Any] = captured.forward
        calibrating, held_out = split(len(batches))
        self._calibrating = [batches[i] for i in calibrating]
        self._held_out = [batches[i] for i in held_out]
        self._tolerance: Tolerance = options.tolerance
        self._verify = str(options.verify)
        is_calibrated = str(getattr(options, "precision", CALIBRATED)) == CALIBRATED
        self._parts = IN_FLOAT if is_calibrated else IN_FLOAT[:1]
        self._in_float = 0.0
        self._reports = reports
        for report in reports:
            report.precision = str(getattr(options, "precision", "int8"))
            report.tolerance = str(options.tolerance)
        allowed = options.fallback == "eager"
        self._switch = EagerSwitch(self._eager, reports, "graph", allowed)
        self._lock = fork_safe_rlock()
        self._served = False  # a call, since the last proof
        self._is_sure = False  # of the last proof
        self._changes, self._wasted = 0, 0
        self._instead: Callable[..., Any] | None = self._begin

    def __call__(self, *args: Any) -> Any:
        """Runs the graph, in int8 once it is verified.

        Raises:
            VerificationError: It is not admitted, and must not fall back.
        """
        instead = self._instead
        if instead is not None:
            return instead(*args)
        STATE.met_unproven = False
        results = self._compiled(*args)
        if STATE.met_unproven:
            return self._after_a_change(results, args)
        self._served = True
        return results

    def _begin(self, *args: Any) -> Any:
        """Quantizes and verifies at the first call."""
        with self._lock:
            if self._instead != self._begin:  # another thread was first
                return self(*args)
            state = snapshot_rng()
            with _apart():
                wrong = self._calibrated_and_proven(args)
            restore_rng(state)
            return self._leave(wrong, args) if wrong else self._compare(*args)

    def _compare(self, *args: Any) -> Any:
        """Returns a call that is compared with eager itself."""
        if self._verify == "off":
            self._instead = None
            return self._compiled(*args)
        state = snapshot_rng()
        start = time.perf_counter()
        with _apart():
            expected = self._eager(*args)
        seconds = time.perf_counter() - start
        restore_rng(state)
        results = self._compiled(*args)
        scores = Scores(self._tolerance)
        scores.add(expected, results)
        for report in self._reports[:1]:
            report.note_comparison(seconds, "")
        if scores.wrong:
            return self._leave(f"{scores.wrong}, in a call", args)
        self._instead = self._compare if self._verify == "always" else None
        return results

    def _after_a_change(self, results: Any, args: Sequence[Any]) -> Any:
        """Eager has computed the results; the next call may be in int8 again."""
        with self._lock:
            if self._is_wasted():
                return results
            state = snapshot_rng()
            with _apart():
                wrong = self._proven(args, self._in_float) and self._calibrated_and_proven(args)
            restore_rng(state)
            if wrong:
                self._leave(f"{wrong}, after weights were changed", args)
        return results

    def _is_wasted(self) -> bool:
        """Returns whether verifying is useless: weights have changed before each recent call."""
        self._changes += 1
        self._wasted = 0 if self._served else self._wasted + 1
        self._served = False
        return self._wasted > WASTED and self._changes % ASK_AGAIN != 0

    def _calibrated_and_proven(self, args: Sequence[Any]) -> str:
        with recording():
            for batch in self._calibrating:
                self._compiled(*_with(args, batch))
        admitted: list[float] = []
        for part in self._parts:
            self._in_float = part
            wrong = self._proven(args, part)
            if not wrong and self._is_sure:
                return ""
            admitted += [] if wrong else [part]
        if not wrong or not admitted:
            return wrong
        self._in_float = admitted[0]
        return self._proven(args, admitted[0])

    def _proven(self, args: Sequence[Any], in_float: float) -> str:
        """Returns why results on held-out batches are not within the tolerance; empty: they are."""
        scores = Scores(self._tolerance)
        start = time.perf_counter()
        with quantizing_for_proof(in_float) as proof:
            for batch in self._held_out:
                given = _with(args, batch)
                state = snapshot_rng()
                expected = self._eager(*given)
                restore_rng(state)
                scores.add(expected, self._compiled(*given))
            wrong = scores.wrong
            proof.passed = not wrong
            self._is_sure = scores.is_sure
        for report in self._reports[:1]:
            report.note_comparison(time.perf_counter() - start, "")
            report.measured = scores.measured
            report.in_float = in_float
        count = len(self._held_out)
        return wrong and f"{wrong}, on {count} held-out batch{'es' if count > 1 else ''}"

    def _leave(self, wrong: str, args: Sequence[Any]) -> Any:
        """Eager takes over; on trial, whoever tries is told."""
        if is_trial_thread():
            raise VerificationError(wrong)
        self._switch.switch_after_mismatch(wrong)
        self._instead = self._eager
        return self._eager(*args)


def _with(args: Sequence[Any], batch: Batch) -> list[Any]:
    return [batch.get(i, value) for i, value in enumerate(args)]


@contextmanager
def _apart() -> Iterator[None]:
    # What is recorded serves calls in other modes, too.
    with private.disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield
