"""How it is decided who runs a graph: an earlier decision is recalled, or a session makes one.

Graphs of Dynamo's and functional graphs ask their question here; what differs between them is how
candidates are compiled and called.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx

from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.cost import CostModel
from dynamo_backends.autotune.decisions import Decision, Decisions
from dynamo_backends.autotune.graph_work import graph_work
from dynamo_backends.autotune.identity import environment, key_of
from dynamo_backends.autotune.means import Means
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.prior import GraphDescription
from dynamo_backends.autotune.session import Outcome, PreparedCandidate, Subject, TuningSession
from dynamo_backends.interface.containment import done_without
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.tuning.budget import Budget, budget_of
from dynamo_backends.tuning.counts import COUNTS
from dynamo_backends.tuning.progress import showing

log = logging.getLogger("dynamo_backends")


class Choice(NamedTuple):
    """Who is to run a graph.

    Attributes:
        winner: Name of the candidate.
        candidates: What is known about each.
        seconds: See `GraphReport.tuning_seconds`.
    """

    winner: str
    candidates: tuple[CandidateReport, ...]
    seconds: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Question:
    """What is decided.

    Attributes:
        kind: Of graph, as in `Decision.graph`.
        mark: A hash of the graph that is equal in every process; None: there is none, and what is
            decided is not kept.
        ops: Number of calls in the graph.
        inputs: Data types and shapes of the inputs that are no weights, for people.
        devices: Types of the devices that tensors are on.
        capture_s: Seconds that Dynamo took for the graph.
        lines: Tells `Decision.lines`.
        work: See `graph_work`.
        facts: What else the decision depends on, in types that JSON has.
    """

    kind: str
    mark: str | None
    ops: int
    inputs: tuple[str, ...]
    devices: Sequence[str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    capture_s: float | None = None
    lines: Callable[[], tuple[str, ...]] = tuple
    work: Mapping[str, float] = field(default_factory=dict)

    def model(self) -> CostModel:
        """Returns what to expect of candidates."""
        return CostModel(Decisions().all(), GraphDescription(self.kind, self.ops, self.work))


def work_of(graph: fx.GraphModule) -> dict[str, float]:
    """See `graph_work`; empty if the graph cannot be described: candidates are ordered worse then.

    Args:
        graph: Dynamo's, or a functional one.
    """
    with done_without(None, "describing a graph for autotune"):
        return graph_work(graph)
    return {}


class DecisionFlow:
    """The way to one decision.

    Args:
        question: What is decided.
        competing: Who takes part, besides eager.
        options: Of autotune.
        others: Names that may have won besides those of candidates.
        report: Where it is noted that a decision could not be read or kept.

    Attributes:
        key: The decision's, on disk; None if nothing is kept.
    """

    def __init__(
        self,
        question: Question,
        competing: Sequence[Candidate],
        options: AutotuneOptions,
        others: Collection[str] = (EAGER,),
        report: GraphReport | None = None,
    ):
        self._question = question
        self._options = options
        self._competing = [c.name for c in competing]
        self._names = {*others, *self._competing}
        self._report = report
        self._short_of_s = 0.0  # see `Decision`
        self._disturbed = 0
        self._mutated: tuple[int, ...] = ()
        self.key: str | None = None
        if options.cache and question.mark is not None:
            self.key = key_of(self._facts(competing))

    def _facts(self, competing: Sequence[Candidate]) -> dict[str, Any]:
        question, options = self._question, self._options
        return {
            "kind": question.kind,
            "graph": question.mark,
            "candidates": {c.name: c.version() for c in competing},
            "options": {**options.common(), "cache": True},
            "objective": options.objective,
            "precision": options.precision,
            "environment": environment(question.devices),
            **self._admitted(),
            **question.facts,
        }

    def _admitted(self) -> dict[str, Any]:
        """Returns what the user admits in int8, and what it is proven on."""
        options = self._options
        if not options.is_int8:
            return {}
        return {"tolerance": repr(options.tolerance), "calibration": repr(options.calibration)}

    @property
    def budget(self) -> Budget:
        """What is left for tuning with these options."""
        return budget_of(repr(self._options), self._options.budget_s)

    def recall(self) -> Decision | None:
        """Returns the decision on disk, if it still decides."""
        if self.key is None:
            return None
        decision = None
        with done_without(self._report, "reading autotune's decisions"):
            decision = Decisions().get(self.key)
        if decision is None:
            return None
        self._disturbed = decision.disturbed
        if not decision.holds(self._names, self._options.budget_s):
            return None
        COUNTS.add(remembered=1)
        self._short_of_s = decision.short_of_s
        return decision

    def tune(
        self,
        what: str,
        subject: Callable[[str], Subject],
        prepared: Callable[[Subject], Sequence[PreparedCandidate]],
        around: AbstractContextManager[Any] | None = None,
        part: float = 1.0,
        in_any_case: Collection[str] = (),
        without: Collection[str] = (),
    ) -> Choice:
        """Lets the candidates compete, and keeps what comes out; eager if that fails.

        Where the budget suffices for none of them nothing is done, nor kept: the next process has a
        budget of its own.

        Args:
            what: The graph in words, for the progress line.
            subject: What they compete for; gets the title of the progress line.
            prepared: They.
            around: What all of it is done in.
            part: See `Means`.
            in_any_case: See `Means`.
            without: Names of those of the competing that take no part in this session.
        """
        budget, title = self.budget, f"autotune: {what}"
        try:
            with budget.spending(), around or nullcontext(), showing(title) as progress:
                means, model = Means(budget, part, in_any_case), self.model()
                if untried := self.untried(means, model, without):
                    means.tell([row.name for row in untried if row.name != EAGER], what)
                    return Choice(EAGER, untried)
                given = subject(title)
                session = TuningSession(
                    given, prepared(given), self._options, model, budget, progress, (), means
                )
                outcome = session.decide()
        except Exception as error:
            log.warning("autotune left a graph to eager: %s", brief_error(error))
            log.debug("autotune failed", exc_info=True)
            return Choice(EAGER, (CandidateReport(EAGER),))
        return self.accept(outcome, given.arguments.mutated)

    def model(self) -> CostModel:
        """Returns what to expect of candidates."""
        return self._question.model()

    def untried(
        self, means: Means, model: CostModel | None = None, without: Collection[str] = ()
    ) -> tuple[CandidateReport, ...]:
        """Returns what there is to report where the budget suffices for no candidate; else nothing.

        Args:
            means: That there are.
            model: What to expect of candidates, if that is known already.
            without: See `tune`.
        """
        model = model or self.model()
        names = [name for name in self._competing if name not in without]
        expected = {name: model.predict(name).compile_s for name in names}
        if not expected or any(means.suffice(s, n) for n, s in expected.items()):
            return ()
        refused = (CandidateReport(n, means.refusal(s)) for n, s in expected.items())
        return (CandidateReport(EAGER), *refused)

    def accept(self, outcome: Outcome, mutated: Collection[int]) -> Choice:
        """The choice that a session made, which is written to the disk if anything was tried.

        Args:
            outcome: Of the session.
            mutated: Positions of the inputs that the graph writes to.
        """
        self._short_of_s = outcome.short_of_s
        self._disturbed = self._disturbed + 1 if outcome.disturbed else 0
        self._mutated = tuple(sorted(mutated))
        capture_s = self._question.capture_s
        capture = {} if capture_s is None else {"capture": capture_s}
        choice = Choice(outcome.winner, outcome.rows, {**capture, **outcome.seconds})
        if outcome.is_tried:
            self.keep(choice)
        return choice

    def leave_out(self) -> None:
        """Notes that the budget did not last for all that could have been tried."""
        self._short_of_s = self.budget.total_s

    def keep(self, choice: Choice) -> None:
        """Writes a choice to the disk."""
        if self.key is None:
            return
        question = self._question
        with done_without(self._report, "keeping autotune's decision"):
            Decisions().put(
                Decision(
                    self.key,
                    choice.winner,
                    choice.candidates,
                    question.kind,
                    question.ops,
                    question.inputs,
                    self._options.objective,
                    self._options.precision,
                    self._mutated,
                    environment(question.devices),
                    short_of_s=self._short_of_s,
                    disturbed=self._disturbed,
                    seconds=dict(choice.seconds),
                    lines=question.lines(),
                    features=question.work,
                )
            )

    def forget(self) -> None:
        """Drops the decision on disk: its winner has failed."""
        if self.key is not None:
            Decisions().drop(self.key)
