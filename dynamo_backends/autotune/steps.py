"""A whole training step, compiled by the fastest backend that was proven right.

Functional programs compete, since those can be tried on copies (see `GraphEnsemble`). The winner,
if it is not eager, is then compiled in its own way of steps, which may write over parameters and
state, and so are others that are not much slower and have such a way, in which they may be faster:
what XLA and Inductor make of a step is not what they make of a functional graph. Each is proven
right in that way too, on copies. Real steps are then taken in turns by these and by the user's
function in eager, until it is known who is fastest.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.step.backends import compile_whole, step_backend
from dynamo_backends.aot.step.online_comparison import OnlineComparison, eager_wins
from dynamo_backends.aot.step.programs import CopyingProgram, StepProgram
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.flow import Choice
from dynamo_backends.autotune.functional import (
    FUNCTION,
    NOT_COMPILED,
    GraphEnsemble,
    decomposed,
    dialect,
)
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.proof import Proof
from dynamo_backends.graph.decompose import retrace
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.lstm import without_workspaces
from dynamo_backends.interface.errors import DynamoBackendsError, StepCaptureError, brief_error
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.tuning.counts import COUNTS
from dynamo_backends.tuning.progress import showing

log = logging.getLogger("dynamo_backends")

RIVALS = 2  # so many beside the winner are tried on real steps
NEAR = 1.5  # if their functional programs take at most so many times as long


class StepEnsemble(StepProgram):
    """The candidates for a whole step; the first one chooses.

    Args:
        graph: Of the kind "step", undecomposed (see `Autotune.keeps`).
        options: Of autotune.
    """

    def __init__(self, graph: Graph, options: AutotuneOptions):
        self._graph = graph
        self._functional = without_workspaces(graph)  # what can run in parts and without gradients
        self._ensemble = GraphEnsemble(self._functional, options)
        self._report: GraphReport | None = None
        self._choice: Choice | None = None
        self._program: StepProgram | None = None
        self._rivals: dict[str, StepProgram] = {}  # while real steps are compared
        self._lock = threading.Lock()
        self.prefers_eager = False
        self.comparison = None

    def report_to(self, report: GraphReport) -> None:
        """See `StepProgram.report_to`."""
        self._report = report
        self._ensemble.report_to(report)

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        if self._program is None:
            with self._lock, private.disable_current_modes(), torch.no_grad():
                self._program = self._program or self._choose(inputs)
        elif self.comparison is not None and self.comparison.turn is not None:
            self._program = list(self._rivals.values())[self.comparison.turn]
        self.launches += 1
        try:
            self._program(inputs, taken)
        except StepCaptureError:  # parameters or state are lost: eager cannot go on
            raise
        except Exception as error:
            if taken or self._choice is None or self._runs_in_eager:
                raise
            self._give_up(self._choice, error, inputs, taken)

    @property
    def _runs_in_eager(self) -> bool:
        """Whether nothing compiled takes steps any more."""
        return not self._rivals and self._choice is not None and self._choice.winner in NOT_COMPILED

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        assert self._program is not None
        return self._program.outputs(taken)

    def _choose(self, inputs: Sequence[Tensor]) -> StepProgram:
        programs: dict[str, StepProgram] = {}
        for _ in range(2):  # if what was decided before fails, there is a tuning session
            choice = self._choice = self._ensemble.choose(list(inputs))
            if choice.winner in NOT_COMPILED:
                break
            try:
                programs[choice.winner] = self._compile(self._ensemble.candidate(choice.winner))
                break
            except Exception as error:
                text = brief_error(error)
                log.warning("autotune chooses anew, %s failed: %s", choice.winner, text)
                self._ensemble.forget()
        else:
            choice = self._choice = choice._replace(winner=EAGER)
        self._ensemble.note(choice)
        if not any(row.name == FUNCTION for row in choice.candidates):  # not settled before
            programs = self._compare(choice, programs, inputs)
        self.prefers_eager = not programs
        return next(iter(programs.values()), None) or self._eager()

    def _compare(
        self, choice: Choice, winner: dict[str, StepProgram], inputs: Sequence[Tensor]
    ) -> dict[str, StepProgram]:
        """Begins to compare on real steps; returns who takes part, if anybody does."""
        proof = Proof(self._functional, inputs)
        for name, program in (winner | self._compile_rivals(choice)).items():
            with self._ensemble.budget.spending(), showing("autotune: step graph") as progress:
                progress(f"autotune: verifying steps of {name}")
                wrong = proof.wrong(program)
            if wrong:
                self._exclude(name, wrong)
            else:
                self._rivals[name] = program
        if self._rivals:
            self.comparison = OnlineComparison(self._settle, [[] for _ in self._rivals])
        elif self._choice != choice:
            self._settle_for_eager()
        return self._rivals

    def _exclude(self, name: str, wrong: str) -> None:
        """Notes that the steps of a candidate are not what eager's are."""
        assert self._choice is not None
        log.warning("autotune does not let %s take steps: %s", name, wrong)
        reason = f"wrong in its own way of steps: {wrong}"
        rows = (replace(r, reason=reason) if r.name == name else r for r in self._choice.candidates)
        self._choice = self._choice._replace(candidates=tuple(rows))

    def _settle_for_eager(self) -> None:
        assert self._choice is not None
        rows = (*self._choice.candidates, CandidateReport(FUNCTION))
        self._choice = self._choice._replace(winner=FUNCTION, candidates=rows)
        self._ensemble.settle(self._choice)

    def _compile_rivals(self, choice: Choice) -> dict[str, StepProgram]:
        """In their own ways of steps, as long as the budget lasts."""
        programs = {}
        budget = self._ensemble.budget
        for row in islice(self._near(choice), RIVALS):
            with budget.spending(), showing("autotune: step graph") as progress:
                if (row.compile_s or 0.0) > budget.left_s:
                    self._ensemble.leave_out()
                    continue
                progress(f"autotune: compiling steps with {row.name}")
                try:
                    programs[row.name] = self._written_over(self._ensemble.candidate(row.name))
                except Exception as error:
                    log.debug("%s is not tried on real steps: %s", row.name, error)
        return programs

    def _near(self, choice: Choice) -> Iterator[CandidateReport]:
        """Those that may turn out to be faster than the winner, the fastest first."""
        measured = {r.name: r.seconds for r in choice.candidates if r.seconds is not None}
        limit = NEAR * measured.get(choice.winner, 0.0)
        for row in sorted(choice.candidates, key=lambda r: r.seconds or 0.0):
            if row.name in (choice.winner, *NOT_COMPILED) or row.seconds is None:
                continue
            if row.seconds <= limit and self._ensemble.candidate(row.name).has_own_steps:
                yield row

    def _settle(self, compiled: Sequence[float], eager: float) -> None:
        """Notes who was fastest on real steps, also on disk."""
        assert self._choice is not None
        assert self.comparison is not None
        COUNTS.add(samples=sum(map(len, (*self.comparison.compiled, self.comparison.eager))))
        seconds = dict(zip(self._rivals, compiled, strict=True))
        winner = min(seconds, key=seconds.__getitem__)
        self.comparison, self.prefers_eager = None, eager_wins(seconds[winner], eager)
        programs, self._rivals = self._rivals, {}
        seconds[FUNCTION] = eager
        if self.prefers_eager:
            winner, self._program = FUNCTION, self._eager()
        else:
            self._program = programs[winner]

        def why_not(name: str) -> str:
            if name == winner:
                return ""
            took = f"{seconds[winner] * 1e3:.3g} ms against {seconds[name] * 1e3:.3g} ms"
            return f"{winner} took {took} in real steps"

        if self._report is not None and winner not in (FUNCTION, self._choice.winner):
            self._report.ops_on_backend += self._report.ops_in_eager
            self._report.ops_in_eager = 0
            self._report.fallbacks = tuple(f for f in self._report.fallbacks if f.by_design)
        rows = [*self._choice.candidates, CandidateReport(FUNCTION, seconds=eager)]
        told = (replace(r, reason=why_not(r.name)) if r.name in seconds else r for r in rows)
        self._choice = self._choice._replace(winner=winner, candidates=tuple(told))
        self._ensemble.settle(self._choice)

    def _compile(self, candidate: Candidate) -> StepProgram:
        try:
            return self._written_over(candidate)
        except DynamoBackendsError as error:
            log.debug("%s copies the results of a step: %s", candidate.name, error)
        return CopyingProgram(self._functional, self._ensemble.build(candidate))

    def _written_over(self, candidate: Candidate) -> StepProgram:
        if candidate.owner != "ours":
            torchs = step_backend(candidate.backend, None)
            return torchs.compile(retrace(self._graph, torchs.decompositions))
        backend, options = self._ensemble.compiler(candidate)
        return compile_whole(backend, options, decomposed(self._graph, dialect(backend, options)))

    def _eager(self) -> StepProgram:
        module = self._graph.module
        return CopyingProgram(self._graph, lambda inputs: module(*inputs))

    def _take_in_eager(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        self._program = self._eager()
        self._program(inputs, taken)

    def _give_up(
        self, choice: Choice, error: Exception, inputs: Sequence[Tensor], taken: list[Any]
    ) -> None:
        """Takes in eager a step that failed; of several that take real steps the others go on."""
        names = [name for name, program in self._rivals.items() if program is self._program]
        failure = f"{[*names, choice.winner][0]} failed in a step"
        if self.comparison is not None and list(self._rivals) != [choice.winner]:
            reports = [] if self._report is None else [self._report]
            then = "others go on"
            switch = EagerSwitch(self._take_in_eager, reports, "step", failure=failure, then=then)
            switch.instead(error, inputs, taken)
            self.comparison.give_up(list(self._rivals).index(names[0]))
            return
        self._ensemble.switch(self._take_in_eager, "step", failure).instead(error, inputs, taken)
        self.comparison, self.prefers_eager, self._rivals = None, True, {}
        self._choice = choice._replace(winner=EAGER)
