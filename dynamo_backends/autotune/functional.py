"""One functional graph in normal form: a forward, a backward, or a whole step.

Candidates compile the whole graph through the pipeline's program builder, so each has its own
partition and its own operators in eager. Inputs are known at the first call; the choice is made
there.
"""

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends import report as reporting
from dynamo_backends.aot.inputs import value_text
from dynamo_backends.autotune import budget as budgets
from dynamo_backends.autotune.arguments import Arguments, Run
from dynamo_backends.autotune.candidates import EAGER, Candidate, candidates
from dynamo_backends.autotune.contest import Contest, Entrant, Outcome, Subject
from dynamo_backends.autotune.cost import CostModel
from dynamo_backends.autotune.counts import COUNTS
from dynamo_backends.autotune.decisions import Decision, Decisions
from dynamo_backends.autotune.identity import environment, key_of
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.progress import showing
from dynamo_backends.backend import Backend, Bound, Executable
from dynamo_backends.bench.runner import brief_error
from dynamo_backends.graph.decompositions import decompositions
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import WEIGHT_ROLES, Graph, Role
from dynamo_backends.inductor.blocks import InductorBlocks
from dynamo_backends.registry import get_backend
from dynamo_backends.report import CandidateReport, GraphReport
from dynamo_backends.stance import compiles_nothing
from dynamo_backends.toolkit.expansion import decompose
from dynamo_backends.toolkit.preparation import in_order
from dynamo_backends.toolkit.results import Results
from dynamo_backends.verify import in_float64

log = logging.getLogger("dynamo_backends")

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
        self._results = Results(graph)
        self._lock = threading.RLock()
        self._report: GraphReport | None = None
        self._reports: dict[str, GraphReport] = {}
        self._programs: dict[str, Run] = {}
        self._key: str | None = None
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
        if run == self._eager:
            return self._eager(values)
        try:
            return list(run(list(values)))
        except Exception as error:
            results = self._eager(values)
            self._replace(brief_error(error))
            return results

    def _eager(self, values: Sequence[Any]) -> list[Any]:
        return self._results(self._graph.module(*values))

    def _replace(self, reason: str) -> None:
        COUNTS.replaced += 1
        self._chosen = self._eager
        text = f"what autotune had chosen failed: {reason}"
        log.warning("%s; the graph runs in eager from now on", text)
        if self._report is not None:
            self._report.runtime_fallbacks.append(text)
            self._report.chosen = EAGER
        if self._key is not None:
            Decisions().drop(self._key)

    # Choosing.

    def _choose(self, values: list[Any]) -> Run:
        competing = [
            c for c in candidates(self._options, self._devices)
            if (c.owner == "ours" or c.backend == InductorBlocks.name) and not c.reduced
        ]  # fmt: skip
        facts = self._facts(competing)
        self._key = key_of(facts)
        if self._options.cache:
            decision = Decisions().get(self._key)
            run = self._again(decision, competing) if decision is not None else None
            if decision is not None and run is not None:
                COUNTS.remembered += 1
                self._note(decision.winner, decision.candidates)
                return run
        try:
            outcome = self._decide(values, competing)
        except Exception as error:
            log.warning("autotune left a graph to eager: %s", brief_error(error))
            outcome = Outcome(EAGER, (CandidateReport(EAGER),))
        else:
            if self._options.cache:
                Decisions().put(self._decision(self._key, outcome))
        run = self._eager if outcome.winner == EAGER else self._programs[outcome.winner]
        self._note(outcome.winner, outcome.rows)
        self._programs.clear()
        return run

    def _facts(self, competing: Sequence[Candidate]) -> dict[str, Any]:
        return {
            "kind": self._graph.kind,
            "graph": fingerprint(self._graph),
            "candidates": {c.name: c.version() for c in competing},
            "options": {**self._options.common(), "cache": True},
            "objective": self._options.objective,
            "environment": environment(self._devices),
        }

    def _again(self, decision: Decision, competing: Sequence[Candidate]) -> Run | None:
        if decision.winner == EAGER:
            return self._eager
        for candidate in competing:
            if candidate.name == decision.winner:
                try:
                    COUNTS.compiled += 1
                    return self._build(candidate)
                except Exception as error:
                    text = brief_error(error)
                    log.warning("autotune chooses anew, %s failed: %s", decision.winner, text)
                    Decisions().drop(decision.key)
        return None

    def _decision(self, key: str, outcome: Outcome) -> Decision:
        values = [p.meta["val"] for p in self._graph.placeholders]
        inputs = zip(values, self._graph.inputs, strict=True)
        return Decision(
            key,
            outcome.winner,
            outcome.rows,
            self._graph.kind,
            len(self._graph.calls),
            tuple(value_text(v) for v, x in inputs if x.role not in _WEIGHTS),
            self._options.objective,
            self._options.precision,
            (),
            environment(self._devices),
        )

    def _decide(self, values: list[Any], competing: Sequence[Candidate]) -> Outcome:
        graph, options = self._graph, self._options
        budget = budgets.budget_of(repr(options), options.budget_s)
        title = f"autotune: {graph.kind} graph with {len(graph.calls)} operators"
        static = [i for i, x in enumerate(graph.inputs) if x.role in _WEIGHTS]
        with budget.spending(), showing(title) as progress:
            precise = in_float64(graph.module)
            subject = Subject(
                self._eager,
                lambda args: precise(*args),
                Arguments(values, static, ()),
                ops=len(graph.calls),
                title=title,
            )
            model = CostModel(Decisions().all())
            entrants = [self._entrant(c) for c in competing]
            return Contest(subject, entrants, options, model, budget, progress).decide()

    def _entrant(self, candidate: Candidate) -> Entrant:
        def build() -> Run:
            run = self._programs[candidate.name] = self._build(candidate)
            return run

        def failed() -> str:
            report = self._reports[candidate.name]
            if report.runtime_fallbacks:
                return f"failed when it was called: {report.runtime_fallbacks[0]}"
            ran = report.ops_on_backend or report.ops_on_inductor
            return "" if ran else "none of its operators run on this backend"

        return Entrant(candidate.name, build, failed=failed)

    def _build(self, candidate: Candidate) -> Run:
        from dynamo_backends.pipeline import build_program

        if candidate.owner == "ours":
            backend, options = get_backend(candidate.backend), candidate.options(self._options)
        else:
            backend, options = InductorBlocks(), _plain(self._options)
        report = self._reports[candidate.name] = GraphReport(candidate.name, self._graph.kind)
        graph = decomposed(self._graph, backend, options)
        with private.keep_unused_draws(), reporting.apart():
            return build_program(backend, graph, options, report)

    def _note(self, winner: str, rows: tuple[CandidateReport, ...]) -> None:
        """Writes the choice, and what the winner leaves to eager, into the graph's report."""
        report, own = self._report, self._reports.get(winner)
        self._reports.clear()
        if report is None:
            return
        report.candidates += rows
        names = dict.fromkeys([*filter(None, report.chosen.split(", ")), winner])
        report.chosen = ", ".join(names)
        if own is not None:
            report.fallbacks += own.fallbacks
            report.ops_in_eager += own.ops_in_eager
            report.ops_on_backend -= own.ops_in_eager
            report.executables += own.executables - 1
            report.cache_hits += own.cache_hits
        if winner == EAGER:
            calls = len(self._graph.calls)
            report.ops_in_eager, report.ops_on_backend = report.ops_in_eager + calls, 0


def _plain(options: AutotuneOptions) -> Any:
    from dynamo_backends.backend import Options

    return Options(**options.common())


def decomposed(graph: Graph, backend: Backend, options: Any) -> Graph:
    """A copy with only those composite operators that a backend keeps.

    Args:
        graph: With static shapes.
        backend: Whose dialect is wanted.
        options: Of the backend.
    """
    from dynamo_backends.graph.sequence import PASSES

    result = graph.copy()
    rules = decompositions(keep=frozenset(backend.keeps(options)))
    for node in result.calls:
        if node.target in rules and not node._erased:
            decompose(node, rules)
    PASSES(result)
    result.module.recompile()
    return result
