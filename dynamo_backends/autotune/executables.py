"""Runs what autotune chose for a captured function or a functional graph.

`tune_captured_graph` is the way of a graph of Dynamo's from top to bottom. A functional graph is an
`Executable` whose first call chooses, for its inputs are known then.
"""

import gc
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.autotune.decisions import DecisionStore
from dynamo_backends.autotune.functional_subjects import FunctionalGraphSubject
from dynamo_backends.autotune.options import EAGER, AutotuneOptions
from dynamo_backends.autotune.tuner import GraphTuner
from dynamo_backends.autotune.tuning_subjects import CapturedGraphSubject
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.publishing import log_structured_trace, publish
from dynamo_backends.interface.report import GraphReport, Region
from dynamo_backends.interface.stance import compiles_nothing
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.runtime.prepared_executables import make_input_merger
from dynamo_backends.runtime.program import graph_name, record_if_profiled
from dynamo_backends.workers.progress import COUNTS
from dynamo_backends.workers.race import Run


def tune_captured_graph(subject: CapturedGraphSubject) -> Callable[..., Any]:
    """Tunes a captured graph, or loads its decision; returns the winner's function.

    Args:
        subject: The graph.
    """
    subject.check_calibration()
    tuner = GraphTuner(subject)
    result = tuner.restore_winner()
    if result is None:
        in_any_case = subject.apply_warm_start()
        result = tuner.tune(subject.make_workload, in_any_case)
    winner = result.winner
    subject.note_winner(winner, result.candidates)
    reports = subject.winner_reports(winner)
    subject.report_choice(reports, winner, result.candidates)
    for report in reports:
        report.tuning_seconds = result.seconds
        report.log_fallbacks()
        publish(report)
    log_structured_trace(reports[0], "autotune")
    eager: Callable[..., Any] = subject.captured.forward
    compiled = eager if winner == EAGER else subject.compiled[winner]
    losers = subject.compiled.keys() - {winner}
    subject.compiled, subject.reports = {}, {}
    if losers:
        gc.collect()  # graphs refer to themselves
        return_free_memory()
    if winner == EAGER:
        return eager
    return WinnerCallable(
        winner, compiled, eager, sorted(subject.mutated_positions()), reports, tuner.key
    )


def make_eager_fallback(
    eager: Callable[..., Any],
    reports: Sequence[GraphReport],
    region: Region,
    failure: str,
    key: str | None,
) -> EagerSwitch:
    """Makes the switch to eager for a failing winner; it also drops the decision."""
    process = os.getpid()

    def forget() -> None:
        COUNTS.add(replaced=1)
        for report in reports:
            report.chosen = EAGER
            if report.tuning:
                report.tuning = f"gave up ({failure})"
        if key is not None and os.getpid() == process:  # a vendor may fail in a forked child alone
            DecisionStore().drop(key)

    return EagerSwitch(eager, reports, region, failure=failure, on_switch=forget)


class WinnerCallable:
    """Runs a captured graph with the winner; if that fails, in eager from then on.

    Args:
        name: Name of the candidate.
        compiled: The graph, compiled by it.
        eager: The graph as Dynamo captured it.
        mutated: Positions of the inputs that the graph writes to.
        reports: Where the candidate says that its compiled code gave up, if it reports at all.
        key: Key of the decision on disk, which is dropped when the candidate fails.
    """

    def __init__(
        self,
        name: str,
        compiled: Callable[..., Any],
        eager: Callable[..., Any],
        mutated: Sequence[int],
        reports: Sequence[GraphReport],
        key: str | None,
    ):
        self.name = name
        self._compiled = compiled
        self._profiled_as = graph_name(reports[0]) if reports else name
        self._mutated = tuple(mutated)
        self._gave_up = tuple(r.events for r in reports)
        failure = f"{name}, which autotune had chosen, failed"
        self._switch = make_eager_fallback(eager, reports, "graph", failure, key)

    def __call__(self, *args: Any) -> Any:
        """Runs the graph by the candidate that was chosen.

        Raises:
            Exception: What eager raises; or what the candidate raised after it wrote to an input.
        """
        written = [_version(args[i]) for i in self._mutated]
        try:
            with record_if_profiled(self._profiled_as):
                results = self._compiled(*args)
        except Exception as error:
            if written != [_version(args[i]) for i in self._mutated]:
                raise  # eager would start from inputs that are half changed
            results = self._switch.run_eager_instead(error, *args)
            self._compiled, self._gave_up = self._switch.eager, ()
            return results
        for events in self._gave_up:
            if events:
                self._switch.switch_after_error(events[-1].reason)
                self._compiled, self._gave_up = self._switch.eager, ()
                break
        return results


def _version(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    return value._version


class TunedGraph(Executable):
    """Runs a functional graph with the fastest candidate; the first call tunes it.

    Args:
        graph: With static shapes, undecomposed (see `Autotune.preserved_operators`).
        options: Options of autotune.
    """

    def __init__(self, graph: Graph, options: AutotuneOptions):
        self._subject = FunctionalGraphSubject(graph, options)
        self._merge = make_input_merger(graph)
        self._lock = fork_safe_rlock()
        self._switch: EagerSwitch | None = None
        self._winner: Run | None = None

    def set_report(self, report: GraphReport) -> None:
        """See `Executable.set_report`."""
        self._subject.report = report

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`. No weight is prepared here: candidates do that themselves."""

        def run(activations: list[Tensor]) -> list[Tensor]:
            values = self._merge(weights, activations)
            activations.clear()
            return self._run(values)

        return run, ()

    def _run(self, values: list[Any]) -> list[Any]:
        run, eager = self._winner, self._subject.eager
        if run is None and compiles_nothing():
            return list(eager(values))
        if run is None:
            with self._lock, private.disable_current_modes(), torch.no_grad():
                run = self._winner = self._winner or self._choose(values)
        if run is eager:
            return list(eager(values))
        try:
            return list(run(list(values)))
        except Exception as error:
            assert self._switch is not None
            results: list[Any] = self._switch.run_eager_instead(error, values)
            self._winner = eager
            return results

    def _choose(self, values: list[Any]) -> Run:
        subject = self._subject
        tuner = GraphTuner(subject)
        result = tuner.restore_winner() or tuner.tune(lambda: subject.make_workload(values))
        winner = result.winner
        run = subject.eager if winner == EAGER else subject.programs[winner]
        subject.report_choice(*result)
        failure = f"{winner}, which autotune had chosen, failed"
        reports = [] if subject.report is None else [subject.report]
        self._switch = make_eager_fallback(subject.eager, reports, "graph", failure, tuner.key)
        return run
