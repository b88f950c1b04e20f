"""Compiles, verifies and measures the candidates for one graph, and chooses."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynamo_backends.autotune.cost_model import CandidatePruner, CostModel
from dynamo_backends.autotune.graph_budget import GraphBudget, graph_limit_s
from dynamo_backends.autotune.options import EAGER, AutotuneOptions
from dynamo_backends.autotune.symbolic_sizes import interleave_by_count
from dynamo_backends.autotune.trial_inputs import MutatedIntegerResetter, TrialInputs
from dynamo_backends.autotune.verification import Verdict, VerificationCase, verify_on_cases
from dynamo_backends.int8.tolerance import Tolerance
from dynamo_backends.interface.errors import VerificationError, brief_error
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.verify import restore_rng, snapshot_rng
from dynamo_backends.workers import memory
from dynamo_backends.workers.budget import Budget
from dynamo_backends.workers.progress import COUNTS, Progress
from dynamo_backends.workers.race import EQUAL, Race, RaceResult, Run

_SETS = 3  # of inputs, to be rotated
_LARGE = 1 << 28  # bytes of inputs of which one set has to do

_LEADER_S = 1.0  # for which one is compared with eager that may serve meanwhile, about
_LEAD = 0.05  # by which it has to be faster
_EAGER_S = 0.3  # for which eager is called to see how long a call is, about
_EARLY_S = 1.0  # for which candidates are compared after an interruption, about

log = logging.getLogger("dynamo_backends")


class UnsuitableCandidateError(Exception):
    """Raised when a candidate cannot compete; the message says why."""


@dataclass
class PreparedCandidate:
    """A candidate with the callbacks that a tuning session needs of it.

    Attributes:
        name: Unique.
        build: Compiles it; may raise.
        reduced: Its results may be as inexact as eager's under autocast to bfloat16.
        run_isolated: Tries it in a process of its own; returns what went wrong there, or "". None:
            it need not be tried so.
        failed: Asked after calls: why its compiled code gave up and eager ran instead, or "".
        early: Its place among those that are tried before others, which the budget may not last
            for; None: it has none.
        tolerance: Of one in int8: what is admitted of it, which it has proven on held-out batches
            when its first call returns.
        measured: For one in int8: what verification has measured.
    """

    name: str
    build: Callable[[], Run]
    reduced: bool = False
    run_isolated: Callable[[], str] | None = None
    failed: Callable[[], str] = lambda: ""
    early: int | None = None
    tolerance: Tolerance | None = None
    measured: Callable[[], Mapping[str, float]] = dict


def why_failed(reports: Sequence[GraphReport]) -> str:
    """Returns why a candidate runs no part of the graph; "" if it runs some.

    Args:
        reports: Of what was compiled for it; without any, nothing is known.
    """
    events = [event for report in reports for event in report.events]
    if events:
        return f"failed when it was called: {events[0].reason}"
    if not reports or any(r.ops_on_backend or r.ops_on_inductor for r in reports):
        return ""
    reasons = [
        reason
        for report in reports
        for reason in (
            report.reverted,
            *(f"{c.name} {c.reason}" for c in report.candidates if c.name != EAGER),
            *(f.reason for f in report.fallbacks if not f.by_design),
        )
        if reason
    ]
    return ": ".join(["the backend runs none of its operators", *reasons[:1]])


@dataclass
class Workload:
    """What a tuning session verifies and times: an eager reference, and inputs.

    Attributes:
        original: Eager.
        precise: Eager in float64, or None.
        arguments: Inputs.
        promised: Strides of the outputs that Dynamo promises.
        outputs: See `VerificationCase`.
        title: For the progress line.
        perturb: Whether results for other inputs than the real ones are compared as well.
        others: Inputs of other sizes, for which the candidates compete as well.
        counts: How often the inputs' sizes occurred, and those of each of the others.
    """

    original: Run
    precise: Run | None
    arguments: TrialInputs
    promised: Sequence[Sequence[int] | None] = ()
    outputs: int | None = None
    title: str = "autotune"
    perturb: bool = True
    others: Sequence[TrialInputs] = ()
    counts: Sequence[int] = ()

    def make_cases(self, clock: Callable[[], float] = time.perf_counter) -> list[VerificationCase]:
        """Makes the cases to verify on: real inputs, perturbed ones, and other sizes.

        Args:
            clock: Tells the seconds of first calls.
        """
        given = self.original, self.precise, self.promised, self.outputs
        found = [VerificationCase(self.arguments, *given, clock=clock)]
        if self.perturb:
            other = self.arguments.perturbed()
            try:
                found.append(
                    VerificationCase(other, *given, clock=clock, where=" (on perturbed inputs)")
                )
            except Exception:
                log.debug("eager raised an error on perturbed inputs", exc_info=True)
        found += [
            VerificationCase(other, *given, clock=clock, where=" (at other sizes)")
            for other in self.others
        ]
        return found

    def make_call_sequence(self) -> list[list[Any]]:
        """Makes inputs of a sequence of calls with the sizes' observed frequencies."""
        fresh = [given.make_call_inputs() for given in (self.arguments, *self.others)]
        return [fresh[i] for i in interleave_by_count(self.counts)]


@dataclass
class SessionOutcome:
    """The winner of a tuning session, and a row for each candidate.

    Attributes:
        winner: Name of the candidate that was chosen.
        rows: What became of each.
        short_of_s: Seconds of the budget, if that did not last for all; else 0.
        seconds: See `GraphReport.tuning_seconds`.
        disturbed: Other processes had the processors while candidates were raced.
    """

    winner: str
    rows: tuple[CandidateReport, ...]
    short_of_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    disturbed: bool = False

    @property
    def tried_any(self) -> bool:
        """Returns whether the budget sufficed to compile at least one candidate."""
        compiled = (row.compile_s is not None for row in self.rows if row.name != EAGER)
        return not self.short_of_s or any(compiled)


class TuningSession:
    """Compiles, verifies and races the candidates of one graph.

    Args:
        workload: What they are verified and measured on.
        prepared: Who takes part besides eager.
        options: Options of autotune.
        model: What to expect of whom.
        budget: Time that may be spent; its clock tells what compiling and verifying take.
        progress: Shows how far it is.
        known: What became of candidates in an earlier session that was lost; those that were
            excluded are not tried again.
        share: What the budget allows for the graph; by default all that is left.
    """

    def __init__(
        self,
        workload: Workload,
        prepared: Sequence[PreparedCandidate],
        options: AutotuneOptions,
        model: CostModel,
        budget: Budget,
        progress: Progress,
        known: Sequence[CandidateReport] = (),
        share: GraphBudget | None = None,
    ):
        self._share = share or GraphBudget(budget)
        self._known = {row.name: row for row in known if row.reason}
        self._reference_s = 0.0
        self._workload = workload
        self._prepared = {e.name: e for e in prepared}
        self._options = options
        self._model = model
        self._budget = budget
        self._progress = progress
        self._rows: dict[str, CandidateReport] = {EAGER: CandidateReport(EAGER, "slower", 0.0, 0.0)}
        self._runs: dict[str, Run] = {EAGER: workload.original}
        self._seen: dict[str, float] = {}  # seconds of a call of each, about
        self._place_in_row = ""
        self._memory: dict[str, int] = {}
        self._cut: list[str] = []
        self._pruner = CandidatePruner(model, options)
        self._has_leader = False

    def choose_winner(self) -> SessionOutcome:
        """Tries the candidates in the predicted order; returns the outcome of their race.

        Raises:
            Exception: What eager raises for these inputs.
        """
        COUNTS.add(sessions=1)
        rng = snapshot_rng()
        try:
            start = self._budget.clock()
            trials = self._workload.make_cases(self._budget.clock)
            self._reference_s = self._budget.clock() - start
            self._share.note_reference_time(self._reference_s)
            of_eager = max(trial.eager_error for trial in trials)
            self._rows[EAGER] = replace(self._rows[EAGER], error=of_eager)
            self._seen[EAGER] = self._glance(self._runs[EAGER], _EAGER_S)
            with self._budget.sharing(self._limit_s()):
                try:
                    return self._decide(trials)
                finally:
                    self._share.warn_of_untried(
                        self._cut, self._workload.title.removeprefix("autotune: ")
                    )
        finally:
            restore_rng(rng)

    def _limit_s(self) -> float:
        """Returns the seconds for this graph; unlimited if the user names candidates."""
        if self._options.candidates:
            return math.inf
        is_differentiated = self._workload.outputs is not None
        return graph_limit_s(self._seen[EAGER], self._budget.total_s, is_differentiated)

    def _decide(self, trials: Sequence[VerificationCase]) -> SessionOutcome:
        order = self._model.rank_candidates(list(self._prepared), self._share.compile_time_left_s)
        order.sort(key=self._place)
        self._try(order, trials)
        if self._cut and len(self._cut) == len(self._prepared):
            return self._untried()
        measured = self._measure()
        best = max(t.speedup.value for n, t in measured.timings.items() if n in self._runs)
        right = len(self._runs)
        if again := self._pruner.note_best_speedup(best):
            self._try(again, trials)
        if len(self._runs) > right:
            measured = self._measure()
        return self._choose(measured)

    def choose_early_winner(self) -> SessionOutcome | None:
        """Chooses among the candidates verified so far, after an interruption.

        Returns:
            None if none was.
        """
        if len(self._runs) == 1:
            return None
        self._cut = [name for name in self._prepared if name not in self._rows]
        for name in self._cut:
            self._rows[name] = CandidateReport(name, "not tried: tuning was interrupted")
        measured = self._race(self._runs, _EARLY_S).run(EAGER)
        return self._choose(self._noted(measured))

    def _place(self, name: str) -> int:
        place = self._prepared[name].early
        return len(self._prepared) if place is None else place

    def _untried(self) -> SessionOutcome:
        """Returns eager as the outcome where the budget suffices for no candidate."""
        self._rows[EAGER] = replace(self._rows[EAGER], reason="")
        seconds = {"reference": self._reference_s}
        return SessionOutcome(EAGER, tuple(self._rows.values()), self._budget.total_s, seconds)

    def _try(self, names: Sequence[str], trials: Sequence[VerificationCase]) -> None:
        """Compiles and verifies those for whom there is time, and who are worth it."""
        for number, name in enumerate(names, 1):
            self._progress.begins(name, number, len(names))
            self._place_in_row = f"{number} of {len(names)}"
            if name in self._known:
                self._rows[name] = self._known[name]
            else:
                self._admit(self._prepared[name], trials)
            if self._rows[name].compile_s is not None:
                self._share.note_compiled(name in self._runs)
            self._progress.ended(self._rows[name])
            self._tell_leader(name)
        self._progress.begins("", len(names), len(names))

    def _tell_leader(self, name: str) -> None:
        """Tells of a candidate that is faster than eager beyond doubt, and may serve meanwhile."""
        is_wanted = self._progress.wants_leader and self._options.objective != "memory"
        if name not in self._runs or self._has_leader or not is_wanted:
            return
        runs = {each: self._runs[each] for each in (EAGER, name)}
        timing = self._race(runs, min(self._share.left_s, _LEADER_S)).run(EAGER).timings.get(name)
        if timing is not None and timing.speedup.low > 1 + _LEAD:
            self._has_leader = True
            self._progress.leads(name)

    def _glance(self, run: Run, within_s: float = 0.0) -> float:
        """Returns the approximate seconds of one call."""
        return self._race({EAGER: run}, 0.0).glance(EAGER, within_s)

    def _say(self, what: str) -> None:
        best = min(self._seen, key=self._seen.__getitem__)
        if best != EAGER:
            speedup = self._seen[EAGER] / self._seen[best]
            what += f", best: {best} {speedup:.1f} × eager"
        title = self._workload.title.partition(" with ")[0]  # in a line that 80 columns hold
        self._progress(f"{title}: {what}", self._share.left_s)

    def _admit(self, prepared: PreparedCandidate, trials: Sequence[VerificationCase]) -> None:
        """Compiles and verifies one; it takes part in the race if nothing is wrong."""
        refusal = self._refusal(prepared.name)
        if refusal:
            self._rows[prepared.name] = CandidateReport(prepared.name, refusal)
            return
        self._say(f"compiling {prepared.name} ({self._place_in_row})")
        start, before = self._budget.clock(), memory.resident()
        compiled: float | None = None
        verified: float | None = None
        verdict = Verdict("")
        try:
            if prepared.run_isolated is not None and (problem := prepared.run_isolated()):
                raise UnsuitableCandidateError(problem)
            start = self._budget.clock()
            COUNTS.add(compiled=1)
            run = prepared.build()
            compiled = self._budget.clock() - start
            self._say(f"verifying {prepared.name} ({self._place_in_row})")
            COUNTS.add(verified=1)
            start = self._budget.clock()
            verdict = verify_on_cases(trials, run, prepared.reduced, prepared.tolerance)
            verified = max(0.0, self._budget.clock() - start - verdict.first_s)
            compiled += verdict.first_s
            problem = prepared.failed()
            reason = f"wrong: {verdict.wrong}" if verdict.wrong else problem
            if not reason:
                self._memory[prepared.name] = memory.resident() - before
                self._seen[prepared.name] = self._glance(run)
        except UnsuitableCandidateError as error:
            reason = str(error)
        except VerificationError as error:  # of one that proves itself
            reason = f"wrong: {error}"
        except Exception as error:
            log.debug("autotune: %s failed", prepared.name, exc_info=True)
            at = "could not be compiled" if compiled is None else "raised when it was called"
            reason = f"{at}: {brief_error(error)}"
        if not reason:
            self._runs[prepared.name] = run
        self._rows[prepared.name] = CandidateReport(
            prepared.name,
            reason,
            compiled,
            verdict.error,
            verify_s=verified,
            measured=dict(prepared.measured()),
        )

    def _refusal(self, name: str) -> str:
        """Returns why a candidate is not tried: it is pruned, or the budget does not suffice."""
        expected = self._model.predict(name).compile_s
        right = [n for n in self._runs if n != EAGER]
        if refusal := self._pruner.why_refused(name, right):
            return refusal
        if self._share.allows_candidate(expected, name):
            return ""
        self._cut.append(name)
        return self._share.why_refused(expected)

    def _race(self, runs: Mapping[str, Run], budget_s: float) -> Race:
        """Returns one between some of those that take part."""
        workload = self._workload
        sets, least, inputs = _SETS, 1, workload.arguments.make_call_inputs
        if workload.others:
            calls = workload.make_call_sequence()
            sets, least, inputs = len(calls), len(calls), iter(calls).__next__
        elif workload.arguments.copied_bytes >= _LARGE:
            sets = 1
        pauses = self._options.objective == "latency"
        counters = MutatedIntegerResetter(workload.arguments)
        return Race(
            {name: counters.wrap_with_reset(run) for name, run in runs.items()},
            lambda: counters.save_initial_values(inputs()),
            sets=sets,
            pauses=pauses,
            budget_s=budget_s,
            least=least,
        )

    def _measure(self) -> RaceResult:
        self._say("measuring")
        race = self._race(self._runs, max(self._share.left_s, 1.0))
        rounds = iter(range(1, 1_000_000))
        return self._noted(race.run(EAGER, lambda: self._say(f"measuring, round {next(rounds)}")))

    def _noted(self, measured: RaceResult) -> RaceResult:
        """Notes in the rows what was measured."""
        for name, reason in measured.failed.items():
            self._drop(name, f"raised when it was called: {reason}")
        for name, seconds in measured.seconds.items():
            self._rows[name] = replace(self._rows[name], race_s=seconds)
        base = measured.timings[EAGER].median
        for name, timing in measured.timings.items():
            ratio = timing.speedup
            row = replace(
                self._rows[name],
                seconds=base / ratio.value,
                speedup=(ratio.value, ratio.low, ratio.high),
                rounds=timing.samples,
            )
            self._rows[name] = row
            if name != EAGER and (problem := self._prepared[name].failed()):
                self._drop(name, problem)
        return measured

    def _drop(self, name: str, reason: str) -> None:
        self._rows[name] = replace(self._rows[name], reason=reason, seconds=None, speedup=None)
        self._runs.pop(name, None)
        self._seen.pop(name, None)

    def _choose(self, measured: RaceResult) -> SessionOutcome:
        order = [n for n in measured.order if n in self._runs]
        if self._options.objective == "memory":
            winner = self._least_memory(order)
        else:
            winner = self._fastest(order, measured)
        for name in order:
            self._rows[name] = replace(self._rows[name], reason=self._why_not(name, winner))
        rows = [self._rows[n] for n in order]
        rows += [row for n, row in self._rows.items() if n not in order]
        short = self._budget.total_s if self._cut else 0.0
        disturbed = not measured.sure
        if disturbed:
            text = (
                "%s: timings were disturbed by other processes (%s); candidates are measured again "
                "later"
            )
            log.info(text, self._workload.title, measured.contention)
        return SessionOutcome(
            winner, tuple(rows), short, {"reference": self._reference_s}, disturbed
        )

    def _fastest(self, order: Sequence[str], measured: RaceResult) -> str:
        """Returns the fastest; among equals eager, else the quickest to compile."""
        equal = [n for n in order if n == order[0] or n in measured.equal]
        if EAGER in equal:
            return EAGER
        best = self._rows[order[0]].seconds or 0.0
        near = [n for n in equal if (self._rows[n].seconds or 0.0) <= best * (1 + EQUAL)]
        return min(near, key=lambda n: self._rows[n].compile_s or 0.0)

    def _least_memory(self, order: Sequence[str]) -> str:
        for name in order:
            grown = self._memory.get(name, 0) + memory.growth(
                lambda name=name: self._runs[name](self._workload.arguments.make_call_inputs())  # type: ignore[misc]
            )
            self._rows[name] = replace(self._rows[name], memory=grown)
        return min(order, key=lambda n: (self._rows[n].memory or 0) // memory.GRAIN)

    def _why_not(self, name: str, winner: str) -> str:
        row, best = self._rows[name], self._rows[winner]
        if name == winner:
            return ""
        if self._options.objective == "memory":
            return f"does not use less memory than {winner}"
        assert row.seconds is not None and best.seconds is not None
        ratio = row.seconds / best.seconds
        if ratio < 1 + EQUAL:
            return f"within {EQUAL:.0%} of {winner}, or not significantly faster"
        return f"takes {ratio:.2f} times as long as {winner}"
