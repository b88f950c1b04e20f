"""`GraphTuner`: recalls who was chosen to run a function, a graph or a step, or has it tuned.

The same steps for all three subjects: find a decision of an earlier session on disk, compile its
winner again, and forget the decision if that fails; else let the candidates compete in a
`TuningSession`, and keep the outcome.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.cost_model import CostModel
from dynamo_backends.autotune.decisions import Decision, DecisionStore, collect_environment
from dynamo_backends.autotune.graph_budget import GraphBudget
from dynamo_backends.autotune.options import EAGER, NOT_COMPILED
from dynamo_backends.autotune.session import SessionOutcome, TuningSession, Workload
from dynamo_backends.autotune.tuning_subjects import TuningSubject
from dynamo_backends.interface.errors import brief_error, suppress_and_log
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.workers.budget import Budget, budget_of
from dynamo_backends.workers.progress import COUNTS, showing

log = logging.getLogger("dynamo_backends")


class TuningResult(NamedTuple):
    """The name of the winner, and a row of measurements for each candidate.

    Attributes:
        winner: Name of the candidate.
        candidates: What is known about each.
        seconds: See `GraphReport.tuning_seconds`.
    """

    winner: str
    candidates: tuple[CandidateReport, ...]
    seconds: Mapping[str, float] = MappingProxyType({})


EAGER_RESULT = TuningResult(EAGER, (CandidateReport(EAGER),))


class UnusableWinnerError(Exception):
    """Raised when a winner cannot run its subject; the message says why."""


class GraphTuner:
    """Finds the decision about one subject on disk, or tunes it and stores the result.

    Args:
        subject: What the candidates compete for.
    """

    def __init__(self, subject: TuningSubject):
        self.subject = subject
        self._short_of_s = 0.0  # see `Decision`
        self._disturbed = 0
        self._mutated: tuple[int, ...] = ()

    @cached_property
    def key(self) -> str | None:
        """Returns the key of the decision on disk; None if decisions are not stored."""
        options = self.subject.options
        return (
            self.subject.key.decision_key(self.subject.competing, options)
            if options.cache
            else None
        )

    @property
    def budget(self) -> Budget:
        """Returns this process's tuning budget for these options, shared by all graphs."""
        options = self.subject.options
        return budget_of(repr(options), options.budget_s)

    def make_cost_model(self) -> CostModel:
        """Makes the cost model of the subject from the decisions on disk."""
        return self.subject.key.make_cost_model()

    def candidate_named(self, name: str) -> Candidate:
        """Returns the competing candidate with this name."""
        return next(c for c in self.subject.competing if c.name == name)

    # Recalling.

    def find_decision(self) -> TuningResult | None:
        """Returns the valid decision on disk, or None; compiles nothing."""
        if self.key is None:
            return None
        subject, decision = self.subject, None
        with suppress_and_log(subject.report, "reading autotune's decisions"):
            decision = DecisionStore().get(self.key)
        if decision is None:
            return None
        self._disturbed = decision.disturbed
        names = {*NOT_COMPILED, *(c.name for c in subject.competing)}
        if not decision.is_valid_for(names, subject.options.budget_s):
            return None
        COUNTS.add(remembered=1)
        self._short_of_s = decision.short_of_s
        subject.known_mutated = frozenset(decision.mutated)
        return TuningResult(decision.winner, decision.candidates, decision.seconds)

    def restore_winner(
        self, rebuild: Callable[[Candidate], Any] | None = None
    ) -> TuningResult | None:
        """Loads the decision on disk and compiles its winner; None if that fails.

        Args:
            rebuild: Compiles the winner, and raises if it cannot run; by default `Subject.build`.

        Returns:
            None if there is no decision, or its winner fails: then the decision is forgotten.
        """
        result = self.find_decision()
        if result is None:
            return None
        problem = self.recompile_winner(result.winner, rebuild)
        if problem:
            log.warning("autotune tunes this graph again: %s %s", result.winner, problem)
            return None
        return result

    def recompile_winner(
        self, winner: str, rebuild: Callable[[Candidate], Any] | None = None
    ) -> str:
        """Compiles an earlier winner; returns why it failed, or "".

        Args:
            winner: Name of the candidate; nothing is done for eager.
            rebuild: See `recall`.

        Returns:
            What went wrong, in words; "" if nothing did.
        """
        if winner in NOT_COMPILED:
            return ""
        COUNTS.add(compiled=1)
        try:
            (rebuild or self.subject.compile_candidate)(self.candidate_named(winner))
        except UnusableWinnerError as error:
            problem = str(error)
        except Exception as error:
            problem = f"failed: {brief_error(error)}"
        else:
            return ""
        self.drop_decision()
        return problem

    # Tuning.

    def tune(
        self,
        workload: Callable[[], Workload],
        in_any_case: Collection[str] = (),
        without: Collection[str] = (),
    ) -> TuningResult:
        """Runs a tuning session and stores its outcome; on failure the winner is eager.

        Where the budget suffices for none of them nothing is done, nor kept: the next process has a
        budget of its own. With `mode="background"` there is no session in a call: another process
        has tuned the subject, or it stays in eager.

        Args:
            workload: What they compete with.
            in_any_case: See `GraphBudget`.
            without: Names of candidates that take no part in this session.
        """
        subject, budget = self.subject, self.budget
        if subject.options.mode == "background":
            log.info("autotune: there is no decision for a %s, which runs in eager", subject.title)
            return EAGER_RESULT
        competing = [c for c in subject.competing if c.name not in without]
        if without and not competing:
            return EAGER_RESULT
        title = f"autotune: {subject.title}"
        try:
            with budget.spending(), subject.tuning_context(), showing(title) as progress:
                share = GraphBudget(budget, subject.budget_share, in_any_case)
                model = self.make_cost_model()
                if untried := self.rows_if_none_affordable(share, model, without):
                    share.warn_of_untried(
                        [row.name for row in untried if row.name != EAGER], subject.title
                    )
                    return TuningResult(EAGER, untried)
                work = workload()
                session = TuningSession(
                    work,
                    [subject.prepare_candidate(candidate, work) for candidate in competing],
                    subject.options,
                    model,
                    budget,
                    progress,
                    share=share,
                )
                try:
                    outcome = session.choose_winner()
                except KeyboardInterrupt:
                    self._keep_early(session, work.arguments.mutated)
                    raise
        except Exception as error:
            log.warning("autotune failed, and a graph runs in eager: %s", brief_error(error))
            log.debug("autotune failed", exc_info=True)
            return EAGER_RESULT
        return self.store_outcome(outcome, work.arguments.mutated)

    def _keep_early(self, session: TuningSession, mutated: Collection[int]) -> None:
        """Keeps what a session knew that the user interrupted."""
        outcome = session.choose_early_winner()
        if outcome is None:
            log.warning(
                "autotune was interrupted before any candidate was verified; nothing is saved"
            )
            return
        self.store_outcome(outcome, mutated)
        log.warning(
            "autotune was interrupted; among the candidates tried so far, %s is the fastest for "
            "%s. %s",
            outcome.winner,
            self.subject.title,
            "With cache=False the decision is not saved."
            if self.key is None
            else (
                "The decision is saved, and the next call uses it. To tune again, raise budget_s "
                "or run `dynamo-backends cache clear`."
            ),
        )

    def rows_if_none_affordable(
        self, share: GraphBudget, model: CostModel, without: Collection[str] = ()
    ) -> tuple[CandidateReport, ...]:
        """Returns rows that refuse all candidates if none fits the budget; else ().

        Args:
            share: What the budget allows.
            model: Predictions for the candidates.
            without: See `tune`.
        """
        names = [c.name for c in self.subject.competing if c.name not in without]
        expected = {name: model.predict(name).compile_s for name in names}
        if not expected or any(share.allows_candidate(s, n) for n, s in expected.items()):
            return ()
        refused = (CandidateReport(n, share.why_refused(s)) for n, s in expected.items())
        return (CandidateReport(EAGER), *refused)

    def store_outcome(self, outcome: SessionOutcome, mutated: Collection[int]) -> TuningResult:
        """Converts a session's outcome to a result; stores it if anything was tried.

        Args:
            outcome: Outcome of the session.
            mutated: Positions of the inputs that the subject writes to.
        """
        self._short_of_s = outcome.short_of_s
        self._disturbed = self._disturbed + 1 if outcome.disturbed else 0
        self._mutated = tuple(sorted(mutated))
        capture_s = self.subject.key.capture_s
        capture = {} if capture_s is None else {"capture": capture_s}
        result = TuningResult(outcome.winner, outcome.rows, {**capture, **outcome.seconds})
        if outcome.tried_any:
            self.store_result(result)
        return result

    # What is on disk.

    def note_budget_shortage(self) -> None:
        """Notes that candidates were skipped for lack of budget, for the stored decision."""
        self._short_of_s = self.budget.total_s

    def store_result(self, result: TuningResult) -> None:
        """Writes the result to disk as a decision."""
        if self.key is None:
            return
        key, options = self.subject.key, self.subject.options
        with suppress_and_log(self.subject.report, "saving autotune's decision"):
            DecisionStore().put(
                Decision(
                    self.key,
                    result.winner,
                    result.candidates,
                    key.kind,
                    key.ops,
                    key.inputs,
                    options.objective,
                    options.precision,
                    self._mutated,
                    collect_environment(key.devices),
                    short_of_s=self._short_of_s,
                    disturbed=self._disturbed,
                    seconds=dict(result.seconds),
                    lines=key.lines(),
                    features=key.work,
                )
            )

    def drop_decision(self) -> None:
        """Removes the decision from disk after its winner has failed."""
        if self.key is not None:
            DecisionStore().drop(self.key)
