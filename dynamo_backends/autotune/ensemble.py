"""One graph of Dynamo's: decides which candidate runs it, or looks up what was decided before."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.inputs import value_text
from dynamo_backends.autotune.arguments import Arguments, find_mutated
from dynamo_backends.autotune.candidates import Candidate, candidates
from dynamo_backends.autotune.chosen import Chosen
from dynamo_backends.autotune.cost import CostModel
from dynamo_backends.autotune.decisions import Decision, Decisions
from dynamo_backends.autotune.identity import captured_fingerprint, describe, environment, key_of
from dynamo_backends.autotune.isolation import is_isolated, rehearsed
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.reference import precise_captured
from dynamo_backends.autotune.session import (
    Outcome,
    PreparedCandidate,
    Subject,
    TuningSession,
    failure_of,
)
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.containment import done_without
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import CandidateReport, GraphReport, Kind
from dynamo_backends.tuning import budget as budgets
from dynamo_backends.tuning.counts import COUNTS
from dynamo_backends.tuning.progress import showing
from dynamo_backends.tuning.race import Run

log = logging.getLogger("dynamo_backends")


class Ensemble:
    """The candidates for one inference graph of Dynamo's.

    Args:
        captured: The graph.
        example_inputs: Its inputs: real tensors, and symbols.
        options: Of autotune.
        number: Of the captured graph, for reports.
    """

    kind = "inference"

    def __init__(
        self,
        captured: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: AutotuneOptions,
        number: int,
    ):
        self.captured = captured
        self.example_inputs = example_inputs
        self.options = options
        self.number = number
        self.values = [private.concrete(x) for x in example_inputs]
        self.devices = sorted({x.device.type for x in self.values if isinstance(x, Tensor)})
        self.ops = sum(node.op.startswith("call_") for node in captured.graph.nodes)
        self.reports: dict[str, list[GraphReport]] = {}
        self.compiled: dict[str, Callable[..., Any]] = {}
        self._mutated: frozenset[int] | None = None

    def compile(self) -> Callable[..., Any]:
        """What Dynamo is to call in place of the graph."""
        competing = self.competing()
        facts = self._facts(competing)
        key = key_of(facts) if facts is not None else None
        decision = self._recall(key, competing)
        if decision is not None:
            made = self._again(decision, competing)
            if made is not None:
                return made
        try:
            outcome = self._decide(competing)
        except Exception as error:
            log.warning("autotune left a graph to eager: %s", brief_error(error))
            log.debug("autotune failed", exc_info=True)
            row = CandidateReport(EAGER)
            return self._finish(EAGER, (row,), key)
        if key is not None and self.options.cache:
            with done_without(None, "keeping autotune's decision"):
                Decisions().put(self._decision(key, outcome))
        return self._finish(outcome.winner, outcome.rows, key)

    def competing(self) -> list[Candidate]:
        """Who takes part, besides eager."""
        return list(candidates(self.options, self.devices))

    # What is remembered.

    def _facts(self, competing: Sequence[Candidate]) -> dict[str, Any] | None:
        """What a decision depends on; None if it cannot be told."""
        mark = captured_fingerprint(self.captured)
        if mark is None:
            return None
        return {
            "kind": self.kind,
            "graph": mark,
            "inputs": [describe(v) if isinstance(v, Tensor) else repr(v) for v in self.values],
            "static": sorted(private.captured_static_inputs(self.captured)),
            "candidates": {c.name: c.version() for c in competing},
            "options": {**self.options.common(), "cache": True},
            "objective": self.options.objective,
            "precision": self.options.precision,
            "environment": environment(self.devices),
        }

    def _recall(self, key: str | None, competing: Sequence[Candidate]) -> Decision | None:
        if key is None or not self.options.cache:
            return None
        decision = None
        with done_without(None, "reading autotune's decisions"):
            decision = Decisions().get(key)
        names = {EAGER, *(c.name for c in competing)}
        if decision is None or not decision.holds(names, self.options.budget_s):
            return None
        return decision

    def _again(
        self, decision: Decision, competing: Sequence[Candidate]
    ) -> Callable[..., Any] | None:
        """Compiles the winner of an earlier session; None if that does not work any more."""
        if decision.winner != EAGER:
            (candidate,) = [c for c in competing if c.name == decision.winner]
            try:
                COUNTS.compiled += 1
                self._build(candidate)
            except Exception as error:
                text = brief_error(error)
                log.warning("autotune chooses anew, %s failed: %s", decision.winner, text)
                Decisions().drop(decision.key)
                return None
        COUNTS.remembered += 1
        self._mutated = frozenset(decision.mutated)
        return self._finish(decision.winner, decision.candidates, decision.key)

    def _decision(self, key: str, outcome: Outcome) -> Decision:
        static = private.captured_static_inputs(self.captured)
        return Decision(
            key,
            outcome.winner,
            outcome.rows,
            self.kind,
            self.ops,
            tuple(value_text(v) for i, v in enumerate(self.values) if i not in static),
            self.options.objective,
            self.options.precision,
            tuple(sorted(self.mutated())),
            environment(self.devices),
            short_of_s=outcome.short_of_s,
        )

    # The session.

    def _decide(self, competing: Sequence[Candidate]) -> Outcome:
        options = self.options
        budget = budgets.budget_of(repr(options), options.budget_s)
        title = f"autotune: {self.kind} graph {self.number} with {self.ops} operations"
        apart = private.apart_from_compilation(), private.disable_current_modes()
        with budget.spending(), apart[0], apart[1], self.grad_mode(), showing(title) as progress:
            subject = self.subject(title)
            model = CostModel(Decisions().all())
            prepared = [self.prepared(c, subject) for c in competing]
            return TuningSession(subject, prepared, options, model, budget, progress).decide()

    def grad_mode(self) -> AbstractContextManager[Any]:
        """In which candidates run."""
        return torch.no_grad()

    def subject(self, title: str) -> Subject:
        """What the candidates compete for."""
        original = self.adapt(self.captured.forward)
        return Subject(
            original,
            self.adapt(precise_captured(self.captured)),
            Arguments(self.values, private.captured_static_inputs(self.captured), self.mutated()),
            _promised(self.captured),
            self.ops,
            title,
        )

    def mutated(self) -> frozenset[int]:
        """Which inputs the graph writes to."""
        if self._mutated is None:
            self._mutated = find_mutated(self.adapt(self.captured.forward), self.values)
        return self._mutated

    def adapt(self, compiled: Callable[..., Any]) -> Run:
        """A compiled graph as the session calls it."""
        return lambda args: compiled(*args)

    def prepared(self, candidate: Candidate, subject: Subject) -> PreparedCandidate:
        """A candidate as it takes part in the session."""
        name = candidate.name

        def rehearse() -> str:
            training = self.kind == "training"
            return rehearsed(candidate, self.captured, subject.arguments, self.options, training)

        return PreparedCandidate(
            name,
            lambda: self._build(candidate),
            candidate.reduced,
            rehearse if is_isolated(candidate, self.options) else None,
            lambda: failure_of(self.reports.get(name, [])),
        )

    def _build(self, candidate: Candidate) -> Run:
        name = candidate.name
        with reporting.apart() as self.reports[name]:
            compiled = candidate.compile(self.captured, self.example_inputs, self.options)
        self.compiled[name] = compiled
        return self._reporting_apart(self.adapt(compiled), self.reports[name])

    def _reporting_apart(self, run: Run, reports: list[GraphReport]) -> Run:
        """Backward graphs are compiled, and reported, at the first call."""

        def call(args: list[Any]) -> Sequence[Any]:
            with reporting.apart() as more:
                results = run(args)
            reports.extend(more)
            return results

        return call

    # What Dynamo gets.

    def _finish(
        self, winner: str, rows: tuple[CandidateReport, ...], key: str | None
    ) -> Callable[..., Any]:
        reports = self.described(winner)
        self.describe_choice(reports, winner, rows)
        for report in reports:
            report.log_fallbacks()
            reporting.publish(report)
        eager: Callable[..., Any] = self.captured.forward
        if winner == EAGER:
            return eager
        compiled = self.compiled[winner]
        self.compiled, self.reports = {}, {}  # the others' code is not needed any more
        return Chosen(winner, compiled, eager, sorted(self.mutated()), reports, key)

    def describe_choice(
        self, reports: Sequence[GraphReport], winner: str, rows: tuple[CandidateReport, ...]
    ) -> None:
        """Notes in the reports what was chosen, and from what."""
        for report in reports:
            report.candidates, report.chosen = rows, winner

    def described(self, winner: str) -> list[GraphReport]:
        """The reports of the winner; made here if it reports nothing itself."""
        reports = self.reports.get(winner)
        if reports:
            return reports
        kind: Kind = "forward" if self.kind == "training" else "inference"
        report = GraphReport(winner, kind, self.number)
        if winner == EAGER:
            report.ops_in_eager = self.ops
        else:
            report.ops_on_backend = self.ops
        return [report]


def _promised(captured: fx.GraphModule) -> list[Sequence[int] | None]:
    """Strides of the outputs when Dynamo traced the graph; None where they are symbolic."""
    outputs: Any = captured.graph.output_node().args[0]
    return [_strides(node) for node in outputs]


def _strides(node: Any) -> Sequence[int] | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return value.stride() if all(isinstance(s, int) for s in value.stride()) else None
