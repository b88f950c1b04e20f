"""One functional graph in normal form: a forward, a backward, or a whole step.

Candidates compile the whole graph through the pipeline's program builder, so each has its own
partition and its own operators in eager. Inputs are known at the first call; the choice is made
there.
"""

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.aot.inputs import value_text
from dynamo_backends.autotune.arguments import Arguments
from dynamo_backends.autotune.candidates import Candidate, candidates
from dynamo_backends.autotune.chosen import switch_of_chosen
from dynamo_backends.autotune.cost import CostModel
from dynamo_backends.autotune.flow import Choice, DecisionFlow, Question, work_of
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.session import PreparedCandidate, Subject, failure_of
from dynamo_backends.graph.call_tracing import CallTraces
from dynamo_backends.graph.decompose import decompose
from dynamo_backends.graph.decompositions import decompositions
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph, user_lines
from dynamo_backends.graph.roles import WEIGHT_ROLES, Role
from dynamo_backends.interface import protocols
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.backend import Backend, Bound, Executable
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.publishing import trace
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.interface.report import CandidateReport, GraphReport, Region
from dynamo_backends.interface.stance import compiles_nothing
from dynamo_backends.pipeline.inductor_blocks import InductorBlocks
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.runtime.preparation import in_order
from dynamo_backends.runtime.results import Results
from dynamo_backends.tuning.budget import Budget
from dynamo_backends.tuning.counts import COUNTS
from dynamo_backends.tuning.race import Run
from dynamo_backends.verify import in_float64

log = logging.getLogger("dynamo_backends")

FUNCTION = "eager, as written"
"""Who takes a whole step when that is the user's function, not its captured graph."""

NOT_COMPILED = (EAGER, FUNCTION)

_FORWARD = 0.5  # of what is left of the budget; the rest is for its backward graph

_WEIGHTS = WEIGHT_ROLES | {Role.MUTATED}


class GraphEnsemble(Executable):
    """The candidates for one functional graph; the first call chooses.

    Args:
        graph: With static shapes, undecomposed (see `Autotune.keeps`).
        options: Of autotune.
    """

    def __init__(self, graph: Graph, options: AutotuneOptions):
        self._graph = graph
        self._options = options
        self._merge = in_order(graph)
        results, module = Results(graph), graph.module
        self._eager: Callable[[Sequence[Any]], list[Any]] = lambda v: results(module(*v))
        self._switch: EagerSwitch | None = None
        self._lock = fork_safe_rlock()
        self._report: GraphReport | None = None
        self._reports: dict[str, GraphReport] = {}
        self._programs: dict[str, Run] = {}
        self._chosen: Run | None = None
        self._devices = sorted(
            {v.device.type for v in (p.meta["val"] for p in graph.placeholders)
             if isinstance(v, Tensor)} or {"cpu"}
        )  # fmt: skip

    def report_to(self, report: GraphReport) -> None:
        """See `Executable.report_to`."""
        self._report = report

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`. Candidates watch the weights that they prepare themselves."""

        def run(activations: list[Tensor]) -> list[Tensor]:
            values = self._merge(weights, activations)
            activations.clear()
            return self._run(values)

        return run, ()

    def _run(self, values: list[Any]) -> list[Any]:
        run = self._chosen
        if run is None and compiles_nothing():
            return self._eager(values)
        if run is None:
            with self._lock, private.disable_current_modes(), torch.no_grad():
                run = self._chosen = self._chosen or self._choose(values)
        if run is self._eager:
            return self._eager(values)
        try:
            return list(run(list(values)))
        except Exception as error:
            assert self._switch is not None
            results: list[Any] = self._switch.instead(error, values)
            self._chosen = self._eager
            return results

    # Choosing.

    def _choose(self, values: list[Any]) -> Run:
        choice = self.choose(values)
        if choice.winner != EAGER and choice.winner not in self._programs:
            try:
                self._programs[choice.winner] = self.build(self.candidate(choice.winner))
            except Exception as error:
                text = brief_error(error)
                log.warning("autotune chooses anew, %s failed: %s", choice.winner, text)
                self.forget()
                choice = self.choose(values)
        run = self._eager if choice.winner == EAGER else self._programs[choice.winner]
        self.note(choice)
        failure = f"{choice.winner}, which autotune had chosen, failed"
        self._switch = self.switch(self._eager, "graph", failure)
        return run

    def choose(self, values: list[Any]) -> Choice:
        """Who is to run the graph: by an earlier decision, or a tuning session.

        Args:
            values: The graph's inputs; not changed.
        """
        return self.recall() or self.tune(values)

    def recall(self) -> Choice | None:
        """Returns the choice of an earlier process, or of this one; nothing is compiled."""
        decision = self._flow.recall()
        if decision is None:
            return None
        COUNTS.add(compiled=decision.winner not in NOT_COMPILED)
        return Choice(decision.winner, decision.candidates, decision.seconds)

    def tune(self, values: list[Any], without: Collection[str] = ()) -> Choice:
        """Lets the candidates compete, and keeps what comes out.

        Beside calls there is no session: another process has tuned the graph, or it stays in eager.

        Args:
            values: The graph's inputs; not changed.
            without: Names of candidates that take no part.
        """
        flow, competing = self._flow, [c for c in self.competing if c.name not in without]
        if self._options.mode == "background":
            log.info(
                "autotune: a %s graph was not decided for, and runs in eager", self._graph.kind
            )
            return Choice(EAGER, (CandidateReport(EAGER),))
        if without and not competing:
            return Choice(EAGER, (CandidateReport(EAGER),))
        return flow.tune(
            f"{self._graph.kind} graph with {len(self._graph.calls)} operators",
            lambda title: self._subject(values, title),
            lambda subject: [self._prepared(c) for c in competing],
            part=_FORWARD if self._graph.kind == "forward" else 1.0,
            without=without,
        )

    def model(self) -> CostModel:
        """Returns what to expect of candidates."""
        return self._flow.model()

    def keep(self, choice: Choice) -> None:
        """Writes a choice to the disk."""
        self._flow.keep(choice)

    def forget(self) -> None:
        """Drops the decision on disk: its winner has failed."""
        self._flow.forget()

    def switch(self, eager: Callable[..., Any], region: Region, failure: str) -> EagerSwitch:
        """Returns the way back from what was chosen (see `switch_of_chosen`)."""
        reports = [] if self._report is None else [self._report]
        return switch_of_chosen(eager, reports, region, failure, self._flow.key)

    def leave_out(self) -> None:
        """Notes that the budget did not last for all that could have been tried."""
        self._flow.leave_out()

    def settle(self, choice: Choice) -> None:
        """Keeps a choice that was made later, in the report and on disk."""
        if self._report is not None:
            self._report.candidates, self._report.chosen = choice.candidates, choice.winner
            self._report.tuning_seconds = choice.seconds
            self._count_if_eager(choice.winner)
            trace(self._report, "autotune")
        self._flow.keep(choice)

    @functools.cached_property
    def competing(self) -> list[Candidate]:
        """Who takes part, besides eager."""
        infers = self._graph.kind == "inference"
        return [
            c for c in candidates(self._options, self._devices)
            if (c.owner == "ours" or c.backend == InductorBlocks.name) and not c.reduced
            and (infers or c.trains)
        ]  # fmt: skip

    @functools.cached_property
    def _flow(self) -> DecisionFlow:
        values = [p.meta["val"] for p in self._graph.placeholders]
        inputs = zip(values, self._graph.inputs, strict=True)
        question = Question(
            self._graph.kind,
            fingerprint(self._graph),
            len(self._graph.calls),
            tuple(value_text(v) for v, x in inputs if x.role not in _WEIGHTS),
            self._devices,
            lines=lambda: user_lines(self._graph.module.graph),
            work=work_of(self._graph.module),
        )
        return DecisionFlow(question, self.competing, self._options, NOT_COMPILED, self._report)

    @property
    def budget(self) -> Budget:
        """What is left for tuning with these options."""
        return self._flow.budget

    def candidate(self, name: str) -> Candidate:
        """Returns one of those that compete, by its name."""
        return next(c for c in self.competing if c.name == name)

    def _subject(self, values: list[Any], title: str) -> Subject:
        precise = in_float64(self._graph.module)
        return Subject(
            self._eager,
            lambda args: precise(*args),
            Arguments(values, weight_places(self._graph), ()),
            title=title,
        )

    def _prepared(self, candidate: Candidate) -> PreparedCandidate:
        def build() -> Run:
            run = self._programs[candidate.name] = self.build(candidate)
            return run

        def failed() -> str:
            return failure_of([self._reports[candidate.name]])

        return PreparedCandidate(candidate.name, build, failed=failed)

    def build(self, candidate: Candidate) -> Run:
        """The whole graph compiled by a candidate, with eager for what it does not support."""
        from dynamo_backends.pipeline.blocks import build_program

        backend, options = self.compiler(candidate)
        number = self._report.capture if self._report is not None else 0
        report = GraphReport(candidate.name, self._graph.kind, number)
        self._reports[candidate.name] = report
        graph = decomposed(self._graph, dialect(backend, options))
        with private.keep_unused_draws(), reporting.apart():
            return build_program(backend, graph, options, report)

    def compiler(self, candidate: Candidate) -> tuple[Backend, Any]:
        """Returns the backend that compiles functional graphs for a candidate, and its options."""
        if candidate.owner == "ours":
            backend = get_backend(candidate.backend)
            return backend, protocols.single_process_options(
                backend, candidate.options(self._options)
            )
        return InductorBlocks(), _plain(self._options)

    def note(self, choice: Choice) -> None:
        """Writes the choice, and what the winner leaves to eager, into the graph's report.

        What was compiled for the session is dropped.
        """
        winner, rows = choice.winner, choice.candidates
        report, own = self._report, self._reports.get(winner)
        self._reports.clear()
        self._programs.clear()
        if report is None:
            return
        report.candidates += rows
        report.tuning_seconds = choice.seconds
        names = dict.fromkeys([*filter(None, report.chosen.split(", ")), winner])
        report.chosen = ", ".join(names)
        if own is not None:
            report.fallbacks += own.fallbacks
            report.ops_in_eager += own.ops_in_eager
            report.ops_on_backend -= own.ops_in_eager
            report.executables += own.executables - 1
            report.cache_hits += own.cache_hits
            report.failures += own.failures
            # The program goes on reporting to its own.
            own.failures, own.events = report.failures, report.events
        self._count_if_eager(winner)
        trace(report, "autotune")

    def _count_if_eager(self, winner: str) -> None:
        if self._report is not None and winner in NOT_COMPILED:
            calls = len(self._graph.calls)
            self._report.ops_in_eager += calls
            self._report.ops_on_backend = 0


def weight_places(graph: Graph) -> list[int]:
    """Positions of the inputs that are parameters, buffers, or what a graph updates."""
    return [i for i, x in enumerate(graph.inputs) if x.role in _WEIGHTS]


def _plain(options: AutotuneOptions) -> Any:
    from dynamo_backends.interface.options import Options

    return Options(**options.common())


def dialect(backend: Backend, options: Any) -> Mapping[Any, Callable[..., Any]]:
    """Returns what a backend wants to be decomposed, and how."""
    return decompositions(keep=frozenset(backend.keeps(options)))


def decomposed(graph: Graph, rules: Mapping[Any, Callable[..., Any]]) -> Graph:
    """Returns a copy in which what there are rules for is decomposed.

    Args:
        graph: With static shapes.
        rules: Functions of an operator's arguments, by the operator.
    """
    from dynamo_backends.graph.sequence import PASSES

    result, traces = graph.copy(), CallTraces()
    for node in result.calls:
        if node.target in rules and not node._erased:
            decompose(node, rules, traces)
    PASSES(result)
    result.module.recompile()
    return result
