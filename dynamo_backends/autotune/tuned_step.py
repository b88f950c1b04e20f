"""A whole training step, compiled by the fastest backend that was proven right.

Backends with steps of their own, which may overwrite parameters and state, compile it in that way
and are proven right on copies. Functional programs of the others compete on copies (see
`GraphSubject`). Real steps are then taken in turns by the former, by the functional program that
won, if it is not eager's, and by the user's function in eager, until it is known who is fastest.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.aot.step.program.programs import (
    OnlineComparison,
    drop_warmup_times,
    eager_wins,
)
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.executables import make_eager_fallback
from dynamo_backends.autotune.functional_subjects import StepVerifier, TrainingStepSubject
from dynamo_backends.autotune.graph_budget import GraphBudget
from dynamo_backends.autotune.options import EAGER, NOT_COMPILED, USER_FUNCTION, AutotuneOptions
from dynamo_backends.autotune.tuner import EAGER_RESULT, GraphTuner
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import DynamoBackendsError, StepCaptureError, brief_error
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.workers.progress import COUNTS, showing
from dynamo_backends.workers.statistics import separate_speedup

log = logging.getLogger("dynamo_backends")

STILL_COMPARED = "training steps are still being compared"
_WRONG = "wrong when it compiles steps natively"


class TunedStepProgram(StepProgram):
    """Runs a training step with the fastest verified program; the first call tunes it.

    Args:
        graph: Graph of the kind "step", undecomposed (see `Autotune.preserved_operators`).
        options: Options of autotune.
    """

    def __init__(self, graph: Graph, options: AutotuneOptions):
        self._subject = TrainingStepSubject(graph, options)
        self._tuner = GraphTuner(self._subject)
        self._result = EAGER_RESULT
        self._program: StepProgram | None = None
        self._rivals: dict[str, StepProgram] = {}  # while real steps are compared
        self._lock = fork_safe_lock()
        self.prefers_eager = False
        self.comparison: OnlineComparison | None = None

    def set_report(self, report: GraphReport) -> None:
        """See `StepProgram.set_report`."""
        self._subject.report = report

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        if self._program is None:
            with self._lock, private.disable_current_modes(), torch.no_grad():
                self._program = self._program or self._choose(inputs)
        elif self.comparison is not None and self.comparison.next_program is not None:
            self._program = list(self._rivals.values())[self.comparison.next_program]
        self.launches += 1
        try:
            self._program(inputs, taken)
        except StepCaptureError:  # parameters or state are lost: eager cannot go on
            raise
        except Exception as error:
            if taken or (not self._rivals and self._result.winner in NOT_COMPILED):
                raise
            self._give_up(error, inputs, taken)

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        assert self._program is not None
        return self._program.outputs(taken)

    # Choosing, at the first call.

    def _choose(self, inputs: Sequence[Tensor]) -> StepProgram:
        verifier = StepVerifier(self._subject, inputs)
        programs = self._recall(verifier)
        if programs is None:
            programs = self._tune(verifier, list(inputs))
        self.prefers_eager = not programs
        return next(iter(programs.values()), None) or self._subject.make_eager_step()

    def _recall(self, verifier: StepVerifier) -> dict[str, StepProgram] | None:
        """Returns who takes steps by an earlier decision; None: there is none that works."""
        subject, programs = self._subject, {}

        def rebuild(candidate: Candidate) -> None:
            programs[candidate.name] = subject.compile_step(candidate)

        result = self._tuner.restore_winner(rebuild)
        if result is None:
            return None
        self._result = result
        if any(row.name == USER_FUNCTION for row in result.candidates):  # it is settled
            subject.report_choice(*result)
            return programs
        for row in result.candidates:
            if row.reason == STILL_COMPARED and row.name != EAGER:
                try:
                    candidate = self._tuner.candidate_named(row.name)
                    programs[row.name] = subject.compile_in_place_step(candidate)
                except Exception as error:
                    log.debug("%s is not tried on training steps: %s", row.name, error)
        return self._compare(self._verified(programs, verifier), keep=False)

    def _tune(self, verifier: StepVerifier, inputs: list[Any]) -> dict[str, StepProgram]:
        """Returns who takes steps from now on: what is right, as far as the budget lasts."""
        subject, programs = self._subject, {}
        native: dict[str, StepProgram] = {}
        rows: list[CandidateReport] = []
        if subject.options.mode != "background":
            self._try_native_step_compilers(verifier, native, rows)
        without = {row.name for row in rows}
        result = self._tuner.tune(lambda: subject.make_workload(inputs), without=without)
        self._result = result._replace(candidates=(*result.candidates, *rows))
        if result.winner not in NOT_COMPILED:
            try:
                candidate = self._tuner.candidate_named(result.winner)
                programs[result.winner] = subject.compile_step(candidate)
            except Exception as error:
                log.warning("autotune excludes %s: %s", result.winner, brief_error(error))
        tried = any(row.compile_s is not None for row in rows)
        return self._compare(self._verified(programs, verifier) | native, keep=tried)

    def _try_native_step_compilers(
        self,
        verifier: StepVerifier,
        programs: dict[str, StepProgram],
        rows: list[CandidateReport],
    ) -> None:
        """Compiles and verifies candidates with steps of their own, as long as the budget lasts.

        Args:
            verifier: Verifier of steps.
            programs: Gets those that are right.
            rows: Gets what became of each; who cannot overwrite this step's state has none, and
                takes part as a functional program.
        """
        budget, model = self._tuner.budget, self._tuner.make_cost_model()
        share, untried = GraphBudget(budget), []
        names = [c.name for c in self._subject.competing if c.has_native_step_compiler]
        for name in model.rank_candidates(names, share.compile_time_left_s):
            expected = model.predict(name).compile_s
            if not share.allows_candidate(expected, name):
                untried.append(name)
                rows.append(CandidateReport(name, share.why_refused(expected)))
                continue
            tried = self._try_native_step_compiler(name, verifier)
            if tried is None:
                continue
            row, program = tried
            rows.append(row)
            if row.compile_s is not None:
                share.note_compiled(program is not None)
            if program is not None:
                programs[name] = program
        if untried:
            self._tuner.note_budget_shortage()
            share.warn_of_untried(
                untried, f"step graph with {len(self._subject.step.calls)} operators"
            )

    def _try_native_step_compiler(
        self, name: str, verifier: StepVerifier
    ) -> tuple[CandidateReport, StepProgram | None] | None:
        """Returns what became of a candidate, and its program if that is right; None: it copies."""
        budget = self._tuner.budget
        with budget.spending(), showing("autotune: step graph") as progress:
            progress(f"autotune: compiling steps with {name}")
            start = budget.clock()
            try:
                program = self._subject.compile_in_place_step(self._tuner.candidate_named(name))
            except DynamoBackendsError as error:
                log.debug(
                    "%s returns step results out of place, so they are copied: %s", name, error
                )
                return None
            except Exception as error:
                return CandidateReport(name, f"could not be compiled: {brief_error(error)}"), None
            COUNTS.add(compiled=1)
            compiled = budget.clock() - start
            progress(f"autotune: verifying steps of {name}")
            mismatch = verifier.find_mismatch(program)
            verified = budget.clock() - start - compiled
        row = CandidateReport(name, STILL_COMPARED, compiled, verify_s=verified)
        return (_wrong(row, mismatch), None) if mismatch else (row, program)

    def _verified(
        self, programs: Mapping[str, StepProgram], verifier: StepVerifier
    ) -> dict[str, StepProgram]:
        """Returns those of them whose steps are what eager's are."""
        right = {}
        for name, program in programs.items():
            with self._tuner.budget.spending(), showing("autotune: step graph") as progress:
                progress(f"autotune: verifying steps of {name}")
                mismatch = verifier.find_mismatch(program)
            if mismatch:
                rows = self._result.candidates
                rows = tuple(_wrong(r, mismatch) if r.name == name else r for r in rows)
                self._result = self._result._replace(candidates=rows)
            else:
                right[name] = program
        return right

    # Real steps.

    def _compare(self, programs: dict[str, StepProgram], keep: bool) -> dict[str, StepProgram]:
        """Begins to compare programs that are right on real steps; returns them.

        Args:
            programs: The first one counts as the winner until it is known who is fastest.
            keep: Whether to write that to the disk.
        """
        winner = next(iter(programs), EAGER)
        rows = (
            replace(row, reason="" if row.name == winner else row.reason or STILL_COMPARED)
            for row in self._result.candidates
        )
        self._result = self._result._replace(winner=winner, candidates=tuple(rows))
        self._subject.report_choice(*self._result)
        if keep:
            self._tuner.store_result(self._result)
        self._rivals = dict(programs)
        if self._rivals:
            self.comparison = OnlineComparison(self._settle, [[] for _ in self._rivals])
        elif any(row.reason.startswith(_WRONG) for row in self._result.candidates):
            self._conclude(
                USER_FUNCTION, (*self._result.candidates, CandidateReport(USER_FUNCTION))
            )
        return programs

    def _settle(self, compiled: Sequence[float], eager: float) -> None:
        """Notes who was fastest on real steps, also on disk."""
        assert self.comparison is not None
        comparison, report = self.comparison, self._subject.report
        COUNTS.add(samples=sum(map(len, (*comparison.compiled, comparison.eager))))
        seconds = dict(zip(self._rivals, compiled, strict=True))
        samples = dict(zip(self._rivals, comparison.compiled, strict=True))
        winner = min(seconds, key=seconds.__getitem__)
        self.comparison, self.prefers_eager = None, eager_wins(seconds[winner], eager)
        programs, self._rivals = self._rivals, {}
        seconds[USER_FUNCTION] = eager
        if self.prefers_eager:
            winner, self._program = USER_FUNCTION, self._subject.make_eager_step()
        else:
            self._program = programs[winner]
        if report is not None and winner not in (USER_FUNCTION, self._result.winner):
            report.ops_on_backend += report.ops_in_eager
            report.ops_in_eager = 0
            report.fallbacks = tuple(f for f in report.fallbacks if f.by_design)

        def measured(row: CandidateReport) -> CandidateReport:
            if row.name not in seconds or math.isinf(seconds[row.name]):
                return row
            took = f"{seconds[winner] * 1e3:.3g} ms against {seconds[row.name] * 1e3:.3g} ms"
            reason = "" if row.name == winner else f"{winner} took {took} in training steps"
            own = drop_warmup_times(samples.get(row.name, comparison.eager))
            ratio = separate_speedup(drop_warmup_times(comparison.eager), own)
            speedup = ratio.value, ratio.low, ratio.high
            return replace(row, reason=reason, seconds=seconds[row.name], speedup=speedup)

        rows = (*self._result.candidates, CandidateReport(USER_FUNCTION))
        self._conclude(winner, tuple(map(measured, rows)))

    def _conclude(self, winner: str, rows: Sequence[CandidateReport]) -> None:
        """Keeps who takes steps from now on."""
        rows = [
            replace(r, reason=f"{USER_FUNCTION}: measured as the uncompiled function")
            if r.name == EAGER
            else r
            for r in rows
        ]
        self._result = self._result._replace(winner=winner, candidates=tuple(rows))
        self._subject.report_change(*self._result)
        self._tuner.store_result(self._result)

    def _run_in_eager(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        self._program = self._subject.make_eager_step()
        self._program(inputs, taken)

    def _give_up(self, error: Exception, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """Takes in eager a step that failed; of several that take real steps the others go on."""
        winner, report = self._result.winner, self._subject.report
        reports = [] if report is None else [report]
        names = [name for name, program in self._rivals.items() if program is self._program]
        failure = f"{[*names, winner][0]} failed in a training step"
        if self.comparison is not None and list(self._rivals) != [winner]:
            then = "the other candidates continue"
            switch = EagerSwitch(self._run_in_eager, reports, "step", failure=failure, then=then)
            switch.run_eager_instead(error, inputs, taken)
            self.comparison.give_up(list(self._rivals).index(names[0]))
            return
        switch = make_eager_fallback(self._run_in_eager, reports, "step", failure, self._tuner.key)
        switch.run_eager_instead(error, inputs, taken)
        self.comparison, self.prefers_eager, self._rivals = None, True, {}
        self._result = self._result._replace(winner=EAGER)


def _wrong(row: CandidateReport, mismatch: str) -> CandidateReport:
    log.warning("autotune excludes %s from training steps: %s", row.name, mismatch)
    return replace(row, reason=f"{_WRONG}: {mismatch}")
