"""`mode="background"`: a graph runs in eager until the winner of another process takes over."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune.executables import WinnerCallable
from dynamo_backends.autotune.options import EAGER
from dynamo_backends.autotune.serialization import cpu_autocast, cpu_autocast_dtype
from dynamo_backends.autotune.status import TrackedGraph, TuningStatus
from dynamo_backends.autotune.symbolic_sizes import (
    GraphSymbols,
    guard_with_assumptions,
    has_symbols,
    wrap_with_call_recording,
)
from dynamo_backends.autotune.trial_inputs import clone_inputs
from dynamo_backends.autotune.tuner import GraphTuner, TuningResult
from dynamo_backends.autotune.tuning_subjects import CapturedGraphSubject
from dynamo_backends.graph.seeded_draws import PrivateRngMode, with_private_rng
from dynamo_backends.interface.publishing import log_structured_trace, publish
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.pipeline import background
from dynamo_backends.workers.race import Run

log = logging.getLogger("dynamo_backends")


class BackgroundTunedGraph:
    """Runs a captured graph in eager until background tuning has found a winner.

    Args:
        subject: The graph; its values are copied.
        reason: Why the graph is not tuned beside calls; empty: it is.

    Attributes:
        draws: Whether the graph draws random numbers (see `look`).
        autocast: In which it was captured.
    """

    def __init__(self, subject: CapturedGraphSubject, reason: str):
        self.eager = eager = subject.captured.forward
        self.report: GraphReport = subject.winner_reports(EAGER)[0]
        self.report.chosen = EAGER
        title = f"{self.report.kind} graph {subject.number} with {subject.ops} operations"
        state = TuningStatus(title, budget_s=subject.options.budget_s)
        self.followed = TrackedGraph(state, [self.report])
        self.is_inference = torch.is_inference_mode_enabled()
        self.autocast = cpu_autocast_dtype()
        self.draws = False
        self.served_by = EAGER
        self.subject: CapturedGraphSubject | None = None
        self.symbols: GraphSymbols | None = None
        self.call: Callable[..., Any] = eager
        if reason:
            self.followed.give_up(reason)
            return
        static = private.captured_static_inputs(subject.captured)
        inputs = subject.example_inputs
        with subject.tuning_context():
            subject.values = clone_inputs(subject.values, static)
        subject.example_inputs = [
            x if isinstance(x, torch.SymInt) else value
            for x, value in zip(inputs, subject.values, strict=True)
        ]
        self.subject = subject
        self.call = _with_foreground_priority(eager)
        if has_symbols(subject.captured):
            self.symbols = GraphSymbols(subject.captured, inputs, subject.values, static)
            self.call = _with_foreground_priority(
                wrap_with_call_recording(eager, self.symbols.traffic)
            )

    def __call__(self, *args: Any) -> Any:
        """Runs the graph in eager, or by the winner once there is one."""
        return self.call(*args)

    @contextlib.contextmanager
    def context(self) -> Iterator[CapturedGraphSubject]:
        """Enters the modes in which the graph was captured; yields the subject."""
        assert self.subject is not None
        with (
            torch.inference_mode(self.is_inference),
            cpu_autocast(self.autocast),
            self.subject.tuning_context(),
        ):
            yield self.subject

    def probe_side_effects(self) -> None:
        """Calls the graph on copies to see which inputs it mutates and if it draws.

        Raises:
            DrawsError: It draws, and cannot do so without taking numbers of the calls.
        """
        assert self.subject is not None
        with PrivateRngMode() as draws:
            self.subject.mutated_positions()
        self.draws = draws.has_drawn

    def wrap_with_private_rng(self, run: Run) -> Run:
        """Wraps a function so that it leaves torch's generators as they were."""
        return with_private_rng(run) if self.draws else run

    def switch_to_candidate(self, name: str, result: TuningResult, tuner: GraphTuner) -> None:
        """Makes a compiled candidate run the following calls."""
        subject = self.subject
        assert subject is not None
        own, *others = subject.winner_reports(name)
        kept = {field: vars(self.report)[field] for field in ("compile_id", "tuning")}
        vars(self.report).update(vars(own) | kept)  # lists of events are shared
        reports = [self.report, *others]
        subject.report_choice(reports, name, result.candidates)
        for report in reports:
            report.tuning_seconds = result.seconds
        for report in others:  # of a backward graph
            publish(report)
        if name != EAGER:
            eager, mutated = subject.captured.forward, sorted(subject.mutated_positions())
            compiled = subject.compiled[name]
            run: Callable[..., Any]
            run = WinnerCallable(name, compiled, eager, mutated, reports, tuner.key)
            if self.symbols is not None and (assumed := self.symbols.assumptions_since_capture):
                run = guard_with_assumptions(assumed, run, eager, name)
            self.call = _with_foreground_priority(run)
        else:
            self.call = _with_foreground_priority(subject.captured.forward)
        self.served_by = name

    def finish_with_winner(
        self, winner: str, result: TuningResult, tuner: GraphTuner, sizes: str = ""
    ) -> None:
        """Makes the winner run all following calls, and ends tuning."""
        if winner != self.served_by or winner == EAGER:
            self.switch_to_candidate(winner, result, tuner)
        else:
            self.report.candidates = result.candidates
            self.report.tuning_seconds = result.seconds
        log_structured_trace(self.report, "autotune")
        self.release_tuning_state()
        self.followed.update_status(
            state="serving", winner=winner, candidate="", meanwhile="", sizes=sizes
        )

    def release_tuning_state(self) -> None:
        """Drops what only tuning needs: the subject and its symbols."""
        self.subject = self.symbols = None

    def stop_tuning(self, reason: str, candidates: Sequence[CandidateReport] = ()) -> None:
        """Ends tuning; calls stay with eager, or the candidate that runs them already.

        Args:
            reason: Why.
            candidates: What is known about them, if anything is.
        """
        self.release_tuning_state()
        self.report.candidates = tuple(candidates) or self.report.candidates
        if self.served_by == EAGER:
            self.call = _with_foreground_priority(self.eager)
            self.followed.give_up(reason)
        else:
            self.followed.update_status(state="serving", winner=self.served_by, reason=reason)


def _with_foreground_priority(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function for whose calls the thread pauses, whichever graph it is busy with."""
    first = background.prioritize_calls(lambda args: run(*args))

    def call(*args: Any) -> Any:
        results = first(list(args))
        background.prioritize_backward(results)
        return results

    return call
