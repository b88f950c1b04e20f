"""A whole training step, compiled by the fastest backend that was proven right.

Backends with a way of their own of steps, which may write over parameters and state, compile it in
that way and are proven right on copies: what XLA and Inductor make of a step is not what they make
of a functional graph. Functional programs of the others compete on copies (see `GraphEnsemble`).
Real steps are then taken in turns by those ways, by the functional program that won, if it is not
eager's, and by the user's function in eager, until it is known who is fastest.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.aot.step.program.backends import compile_whole, step_backend
from dynamo_backends.aot.step.program.online_comparison import (
    OnlineComparison,
    counting,
    eager_wins,
)
from dynamo_backends.aot.step.program.programs import CopyingProgram, StepProgram
from dynamo_backends.autotune.arguments import Arguments
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.flow import Choice
from dynamo_backends.autotune.functional import (
    FUNCTION,
    NOT_COMPILED,
    GraphEnsemble,
    decomposed,
    dialect,
    weight_places,
)
from dynamo_backends.autotune.means import Means
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.session import Subject
from dynamo_backends.autotune.verify import Trial, judge
from dynamo_backends.graph.decompose import retrace
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.lstm import without_workspaces
from dynamo_backends.interface.errors import DynamoBackendsError, StepCaptureError, brief_error
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.tuning.counts import COUNTS
from dynamo_backends.tuning.progress import showing
from dynamo_backends.tuning.race import Run
from dynamo_backends.tuning.statistics import separate_speedup
from dynamo_backends.verify import in_float64, restore_rng, snapshot_rng


# What backends make of a step is not what they make of the functional graph that competes, so it is
# proven right by itself, by the same rule and before it takes a real step.
class Proof:
    """The trials of a step, made when the first program is put to them.

    Args:
        graph: Of the kind "step".
        inputs: Of the step, which is taken on copies of them.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Tensor]):
        self._graph = graph
        self._inputs = inputs

    @cached_property
    def _trials(self) -> list[Trial]:
        module, precise = self._graph.module, in_float64(self._graph.module)
        updated = {i for i, x in enumerate(self._graph.inputs) if x.updated_by is not None}
        return Subject(
            _run(CopyingProgram(self._graph, lambda inputs: module(*inputs))),
            _run(CopyingProgram(self._graph, lambda inputs: precise(*inputs))),
            Arguments(self._inputs, weight_places(self._graph), updated),
        ).trials()

    def wrong(self, program: StepProgram) -> str:
        """What is wrong with the steps of a program, in words; empty if nothing is."""
        COUNTS.add(verified=1)
        rng = snapshot_rng()
        try:
            return judge(self._trials, _run(program)).wrong
        except Exception as error:
            return f"it raised {brief_error(error)}"
        finally:
            restore_rng(rng)


def _run(program: StepProgram) -> Run:
    def run(inputs: list[Any]) -> list[Tensor]:
        taken: list[Any] = []
        with torch.enable_grad():  # as real steps are taken; programs detach what they get
            program(inputs, taken)
        return program.outputs(taken)

    return run


log = logging.getLogger("dynamo_backends")

COMPARED = "real steps are still being compared"
_WRONG = "wrong in its own way of steps"


class StepEnsemble(StepProgram):
    """The candidates for a whole step; the first one chooses.

    Args:
        graph: Of the kind "step", undecomposed (see `Autotune.keeps`).
        options: Of autotune.
    """

    def __init__(self, graph: Graph, options: AutotuneOptions):
        self._graph = graph
        self._functional = without_workspaces(graph)  # what can run in parts and without gradients
        self._options = options
        self._ensemble = GraphEnsemble(self._functional, options)
        self._report: GraphReport | None = None
        self._choice: Choice | None = None
        self._program: StepProgram | None = None
        self._rivals: dict[str, StepProgram] = {}  # while real steps are compared
        self._lock = fork_safe_lock()
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
        programs = self._recalled(inputs)
        if programs is None:
            programs = self._tuned(inputs)
        self.prefers_eager = not programs
        return next(iter(programs.values()), None) or self._eager()

    def _recalled(self, inputs: Sequence[Tensor]) -> dict[str, StepProgram] | None:
        """Who takes steps by an earlier decision; None: there is none, or its winner fails."""
        choice = self._ensemble.recall()
        if choice is None:
            return None
        programs: dict[str, StepProgram] = {}
        if choice.winner not in NOT_COMPILED:
            try:
                programs[choice.winner] = self._compile(self._ensemble.candidate(choice.winner))
            except Exception as error:
                text = brief_error(error)
                log.warning("autotune chooses anew, %s failed: %s", choice.winner, text)
                self._ensemble.forget()
                return None
        self._choice = choice
        if any(row.name == FUNCTION for row in choice.candidates):  # it is settled
            self._ensemble.note(choice)
            return programs
        for row in choice.candidates:
            if row.reason == COMPARED and row.name != EAGER:
                try:
                    programs[row.name] = self._written_over(self._ensemble.candidate(row.name))
                except Exception as error:
                    log.debug("%s is not tried on real steps: %s", row.name, error)
        return self._compare(self._proven(programs, Proof(self._functional, inputs)), keep=False)

    def _tuned(self, inputs: Sequence[Tensor]) -> dict[str, StepProgram]:
        """Who takes steps from now on: what is right, as far as the budget lasts."""
        proof = Proof(self._functional, inputs)
        own: dict[str, StepProgram] = {}
        rows: list[CandidateReport] = []
        if self._options.mode != "background":
            self._try_own_ways(proof, own, rows)
        choice = self._ensemble.tune(list(inputs), without={row.name for row in rows})
        self._choice = choice._replace(candidates=(*choice.candidates, *rows))
        programs: dict[str, StepProgram] = {}
        if choice.winner not in NOT_COMPILED:
            try:
                programs[choice.winner] = self._compile(self._ensemble.candidate(choice.winner))
            except Exception as error:
                log.warning("autotune leaves %s out: %s", choice.winner, brief_error(error))
        tried = any(row.compile_s is not None for row in rows)
        return self._compare(self._proven(programs, proof) | own, keep=tried)

    def _try_own_ways(
        self, proof: Proof, programs: dict[str, StepProgram], rows: list[CandidateReport]
    ) -> None:
        """Compiles and proves those with a way of their own of steps, as long as the budget lasts.

        Args:
            proof: Of steps.
            programs: Gets those that are right.
            rows: Gets what became of each; who cannot write over this step's state has none, and
                takes part as a functional program.
        """
        budget, model = self._ensemble.budget, self._ensemble.model()
        means, cut = Means(budget), []
        names = [c.name for c in self._ensemble.competing if c.has_own_steps]
        for name in model.order(names, means.compile_s):
            expected = model.predict(name).compile_s
            if not means.suffice(expected, name):
                cut.append(name)
                rows.append(CandidateReport(name, means.refusal(expected)))
                continue
            with budget.spending(), showing("autotune: step graph") as progress:
                progress(f"autotune: compiling steps with {name}")
                start = budget.clock()
                try:
                    program = self._written_over(self._ensemble.candidate(name))
                except DynamoBackendsError as error:
                    log.debug("%s copies the results of a step: %s", name, error)
                    continue
                except Exception as error:
                    reason = f"could not be compiled: {brief_error(error)}"
                    rows.append(CandidateReport(name, reason))
                    continue
                COUNTS.add(compiled=1)
                compiled = budget.clock() - start
                progress(f"autotune: verifying steps of {name}")
                wrong = proof.wrong(program)
                verified = budget.clock() - start - compiled
                means.finished(not wrong)
            rows.append(CandidateReport(name, COMPARED, compiled, verify_s=verified))
            if wrong:
                rows[-1] = self._wrong(rows[-1], wrong)
            else:
                programs[name] = program
        if cut:
            self._ensemble.leave_out()
            means.tell(cut, f"step graph with {len(self._graph.calls)} operators")

    def _promise(self, winner: str) -> None:
        """Notes who is the winner until real steps were compared."""
        assert self._choice is not None
        rows = (
            replace(row, reason="" if row.name == winner else row.reason or COMPARED)
            for row in self._choice.candidates
        )
        self._choice = self._choice._replace(winner=winner, candidates=tuple(rows))

    def _proven(self, programs: dict[str, StepProgram], proof: Proof) -> dict[str, StepProgram]:
        """Returns those of them whose steps are what eager's are."""
        right = {}
        for name, program in programs.items():
            with self._ensemble.budget.spending(), showing("autotune: step graph") as progress:
                progress(f"autotune: verifying steps of {name}")
                wrong = proof.wrong(program)
            if wrong:
                self._exclude(name, wrong)
            else:
                right[name] = program
        return right

    def _compare(self, programs: dict[str, StepProgram], keep: bool) -> dict[str, StepProgram]:
        """Begins to compare programs that are right on real steps; returns them.

        Args:
            programs: The first one counts as the winner until it is known who is fastest.
            keep: Whether to write that to the disk.
        """
        self._promise(next(iter(programs), EAGER))
        assert self._choice is not None
        self._ensemble.note(self._choice)
        if keep:
            self._ensemble.keep(self._choice)
        self._rivals = dict(programs)
        if self._rivals:
            self.comparison = OnlineComparison(self._settle, [[] for _ in self._rivals])
        elif any(row.reason.startswith(_WRONG) for row in self._choice.candidates):
            self._settle_for_eager()
        return programs

    def _exclude(self, name: str, wrong: str) -> None:
        """Notes that the steps of a candidate are not what eager's are."""
        assert self._choice is not None
        rows = (self._wrong(r, wrong) if r.name == name else r for r in self._choice.candidates)
        self._choice = self._choice._replace(candidates=tuple(rows))

    def _wrong(self, row: CandidateReport, wrong: str) -> CandidateReport:
        log.warning("autotune does not let %s take steps: %s", row.name, wrong)
        return replace(row, reason=f"{_WRONG}: {wrong}")

    def _settle_for_eager(self) -> None:
        assert self._choice is not None
        self._conclude(FUNCTION, (*self._choice.candidates, CandidateReport(FUNCTION)))

    def _settle(self, compiled: Sequence[float], eager: float) -> None:
        """Notes who was fastest on real steps, also on disk."""
        assert self._choice is not None
        assert self.comparison is not None
        comparison = self.comparison
        COUNTS.add(samples=sum(map(len, (*comparison.compiled, comparison.eager))))
        seconds = dict(zip(self._rivals, compiled, strict=True))
        samples = dict(zip(self._rivals, comparison.compiled, strict=True))
        winner = min(seconds, key=seconds.__getitem__)
        self.comparison, self.prefers_eager = None, eager_wins(seconds[winner], eager)
        programs, self._rivals = self._rivals, {}
        seconds[FUNCTION] = eager
        if self.prefers_eager:
            winner, self._program = FUNCTION, self._eager()
        else:
            self._program = programs[winner]
        if self._report is not None and winner not in (FUNCTION, self._choice.winner):
            self._report.ops_on_backend += self._report.ops_in_eager
            self._report.ops_in_eager = 0
            self._report.fallbacks = tuple(f for f in self._report.fallbacks if f.by_design)

        def told(row: CandidateReport) -> CandidateReport:
            if row.name not in seconds or math.isinf(seconds[row.name]):
                return row
            took = f"{seconds[winner] * 1e3:.3g} ms against {seconds[row.name] * 1e3:.3g} ms"
            reason = "" if row.name == winner else f"{winner} took {took} in real steps"
            counted = counting(samples.get(row.name, comparison.eager))
            ratio = separate_speedup(counting(comparison.eager), counted)
            found = ratio.value, ratio.low, ratio.high
            return replace(row, reason=reason, seconds=seconds[row.name], speedup=found)

        rows = (*self._choice.candidates, CandidateReport(FUNCTION))
        self._conclude(winner, tuple(map(told, rows)))

    def _conclude(self, winner: str, rows: Sequence[CandidateReport]) -> None:
        """Keeps who takes steps from now on."""
        assert self._choice is not None
        rows = [
            replace(r, reason=f"{FUNCTION}: its steps were compared") if r.name == EAGER else r
            for r in rows
        ]
        self._choice = self._choice._replace(winner=winner, candidates=tuple(rows))
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
