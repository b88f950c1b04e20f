"""One graph of Dynamo's: decides which candidate runs it, or looks up what was decided before."""

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.inputs import value_text
from dynamo_backends.autotune import relatives
from dynamo_backends.autotune.arguments import Arguments, find_mutated
from dynamo_backends.autotune.candidates import Candidate, candidates
from dynamo_backends.autotune.chosen import Chosen
from dynamo_backends.autotune.decisions import Decision
from dynamo_backends.autotune.flow import Choice, DecisionFlow, Question, work_of
from dynamo_backends.autotune.identity import captured_fingerprint, describe
from dynamo_backends.autotune.isolation import is_isolated, rehearsed
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.reference import precise_captured
from dynamo_backends.autotune.session import PreparedCandidate, Subject, failure_of
from dynamo_backends.autotune.symbols import bounds_of, has_symbols
from dynamo_backends.graph.graph import user_lines
from dynamo_backends.int8.capture import placed
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.backend import NamedBounds
from dynamo_backends.interface.errors import CompileError, brief_error
from dynamo_backends.interface.publishing import publish, trace
from dynamo_backends.interface.report import CandidateReport, GraphReport, Kind
from dynamo_backends.runtime.memory import return_free_memory
from dynamo_backends.tuning.counts import COUNTS
from dynamo_backends.tuning.race import Run

log = logging.getLogger("dynamo_backends")


class Ensemble:
    """The candidates for one inference graph of Dynamo's.

    Args:
        captured: The graph.
        example_inputs: Its inputs: real tensors, and symbols.
        options: Of autotune.
        number: Of the captured graph, for reports.

    Attributes:
        bounds: See `Candidate.compile`; by default the sizes of the inputs.
        first: The candidates that are tried first, in this order.
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
        self.bounds: NamedBounds | None = bounds_of(captured, [self.values])
        self.devices = sorted({x.device.type for x in self.values if isinstance(x, Tensor)})
        self.ops = sum(node.op.startswith("call_") for node in captured.graph.nodes)
        self.capture_s = private.capture_seconds()
        self.reports: dict[str, list[GraphReport]] = {}
        self.compiled: dict[str, Callable[..., Any]] = {}
        self._mutated: frozenset[int] | None = None
        self.first: Sequence[str] = ()

    def compile(self) -> Callable[..., Any]:
        """Returns what Dynamo is to call in place of the graph."""
        if self.options.is_int8:
            self._check_batches()
        competing = self.competing()
        flow = DecisionFlow(self.question(), competing, self.options)
        decision = flow.recall()
        if decision is not None and self._is_built_again(decision, competing, flow):
            self._mutated = frozenset(decision.mutated)
            choice = Choice(decision.winner, decision.candidates, decision.seconds)
            return self._finish(choice, flow)
        in_any_case = self.begin_with_relatives(competing)
        choice = flow.tune(
            f"{self.kind} graph {self.number} with {self.ops} operations",
            self.subject,
            lambda subject: [self.prepared(c, subject) for c in competing],
            self.apart(),
            in_any_case=in_any_case,
        )
        return self._finish(choice, flow)

    def begin_with_relatives(self, competing: Sequence[Candidate]) -> Sequence[str]:
        """Has those be tried first that won for a graph of the same function (see `relatives`).

        Args:
            competing: Who takes part.

        Returns:
            Who is to be tried whatever is left of the budget, until one is right.
        """
        names = {candidate.name for candidate in competing}
        self.first = [name for name in relatives.ranked(self._mark) if name in names]
        return self.first if has_symbols(self.captured) else ()

    def note_choice(self, choice: Choice) -> None:
        """Has its best candidates be tried first for graphs of the same function."""
        relatives.note(self._mark, choice.winner, choice.candidates)

    @functools.cached_property
    def _mark(self) -> str:
        static = private.captured_static_inputs(self.captured)
        return relatives.mark_of(self.captured, self.values, static, self.kind)

    def _check_batches(self) -> None:
        """Raises `OptionError` if a batch of calibration lacks what the model reads."""
        with contextlib.suppress(CompileError):  # candidates in int8 say that themselves
            placed(self.options, self.captured, self.example_inputs)

    def competing(self) -> list[Candidate]:
        """Who takes part, besides eager."""
        return list(candidates(self.options, self.devices))

    def question(self) -> Question:
        """What is decided."""
        static = private.captured_static_inputs(self.captured)
        inputs = [describe(v) if isinstance(v, Tensor) else repr(v) for v in self.values]
        return Question(
            self.kind,
            captured_fingerprint(self.captured),
            self.ops,
            tuple(value_text(v) for i, v in enumerate(self.values) if i not in static),
            self.devices,
            {"inputs": inputs, "static": sorted(static)},
            self.capture_s,
            work=work_of(self.captured),
            lines=lambda: user_lines(self.captured.graph),
        )

    def _is_built_again(
        self, decision: Decision, competing: Sequence[Candidate], flow: DecisionFlow
    ) -> bool:
        """Compiles the winner of an earlier session, if that still works."""
        if decision.winner == EAGER:
            return True
        (candidate,) = [c for c in competing if c.name == decision.winner]
        try:
            COUNTS.add(compiled=1)
            self.build(candidate)
        except Exception as error:
            text = brief_error(error)
            log.warning("autotune chooses anew, %s failed: %s", decision.winner, text)
            flow.forget()
            return False
        return True

    # The session.

    @contextmanager
    def apart(self) -> Iterator[None]:
        """As if nothing were being compiled, in the mode of gradients that candidates run in."""
        with private.apart_from_compilation(), private.disable_current_modes(), self.grad_mode():
            yield

    def grad_mode(self) -> AbstractContextManager[Any]:
        """In which candidates run."""
        return torch.no_grad()

    def subject(
        self,
        title: str,
        arguments: Arguments | None = None,
        others: Sequence[Arguments] = (),
        counts: Sequence[int] = (),
    ) -> Subject:
        """Returns what the candidates compete for.

        Args:
            title: For the progress line.
            arguments: Other inputs than those of the call that is compiled.
            others: See `Subject`.
            counts: See `Subject`.
        """
        static = private.captured_static_inputs(self.captured)
        promised = _promised(self.captured)
        return Subject(
            self.adapt(self.captured.forward),
            self.adapt(precise_captured(self.captured)),
            arguments or Arguments(self.values, static, self.mutated()),
            promised,
            len(promised) if self.kind == "training" else None,
            title,
            others=others,
            counts=counts,
        )

    def mutated(self) -> frozenset[int]:
        """Returns which inputs the graph writes to."""
        if self._mutated is None:
            self._mutated = find_mutated(self.adapt(self.captured.forward), self.values)
        return self._mutated

    def adapt(self, compiled: Callable[..., Any]) -> Run:
        """Returns a compiled graph as the session calls it."""
        return lambda args: compiled(*args)

    def prepared(self, candidate: Candidate, subject: Subject) -> PreparedCandidate:
        """Returns a candidate as it takes part in the session."""
        name = candidate.name

        def rehearse() -> str:
            training = self.kind == "training"
            return rehearsed(candidate, self.captured, subject.arguments, self.options, training)

        return PreparedCandidate(
            name,
            lambda: self.build(candidate),
            candidate.reduced,
            rehearse if is_isolated(candidate, self.options) else None,
            lambda: failure_of(self.reports.get(name, [])),
            early=self.first.index(name) if name in self.first else None,
            tolerance=self.options.tolerance if candidate.is_int8 else None,
            measured=lambda: self.reports[name][0].measured if self.reports.get(name) else {},
        )

    def build(self, candidate: Candidate, options: AutotuneOptions | None = None) -> Run:
        """Returns the graph compiled by a candidate.

        Args:
            candidate: Which one.
            options: Other ones than those of the session.
        """
        name, options = candidate.name, options or self.options
        with reporting.apart() as self.reports[name]:
            compiled = candidate.compile(self.captured, self.example_inputs, options, self.bounds)
        self.compiled[name] = compiled
        return self._apart(self.adapt(compiled), self.reports[name])

    def _apart(self, run: Run, reports: list[GraphReport]) -> Run:
        """Backward graphs are compiled, and reported, at the first call.

        That call, too, is one as those that follow, outside of Dynamo's capture.
        """

        def call(args: list[Any]) -> Sequence[Any]:
            with reporting.apart() as more, private.outside_of_captures():
                results = run(args)
            reports.extend(more)
            return results

        return call

    # What Dynamo gets.

    def _finish(self, choice: Choice, flow: DecisionFlow) -> Callable[..., Any]:
        winner = choice.winner
        self.note_choice(choice)
        reports = self.described(winner)
        self.describe_choice(reports, winner, choice.candidates)
        for report in reports:
            report.tuning_seconds = choice.seconds
            report.log_fallbacks()
            publish(report)
        trace(reports[0], "autotune")
        eager: Callable[..., Any] = self.captured.forward
        compiled = eager if winner == EAGER else self.compiled[winner]
        self._drop_losers(winner)
        if winner == EAGER:
            return eager
        return Chosen(winner, compiled, eager, sorted(self.mutated()), reports, flow.key)

    def _drop_losers(self, winner: str) -> None:
        """Frees what was compiled besides the winner, and what compiling it left."""
        losers = self.compiled.keys() - {winner}
        self.compiled, self.reports = {}, {}
        if losers:
            gc.collect()  # graphs refer to themselves
            return_free_memory()

    def describe_choice(
        self, reports: Sequence[GraphReport], winner: str, rows: tuple[CandidateReport, ...]
    ) -> None:
        """Notes in the reports what was chosen, and from what."""
        for report in reports:
            report.candidates, report.chosen = rows, winner
            report.tolerance = str(self.options.tolerance or "")

    def described(self, winner: str) -> list[GraphReport]:
        """Returns the reports of the winner; made here if it reports nothing itself."""
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
