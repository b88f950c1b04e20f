"""A whole training step, compiled by the fastest backend that was proven right.

Functional programs compete, since those can be tried on copies (see `GraphEnsemble`). The winner
is then compiled in its own way of steps, which may write over parameters and state. That is
compared with the user's function in eager, which takes every other step for a while.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.step.backends import compile_whole
from dynamo_backends.aot.step.duel import Duel, eager_wins
from dynamo_backends.aot.step.programs import CopyingProgram, StepProgram
from dynamo_backends.autotune.candidates import EAGER, Candidate
from dynamo_backends.autotune.functional import (
    FUNCTION,
    NOT_COMPILED,
    Choice,
    GraphEnsemble,
    decomposed,
    dialect,
)
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.bench.runner import brief_error
from dynamo_backends.errors import DynamoBackendsError, StepCaptureError
from dynamo_backends.graph.graph import Graph
from dynamo_backends.report import CandidateReport, GraphReport
from dynamo_backends.toolkit.expansion import retrace
from dynamo_backends.tuning.counts import COUNTS

log = logging.getLogger("dynamo_backends")


class StepEnsemble(StepProgram):
    """The candidates for a whole step; the first one chooses.

    Args:
        graph: Of the kind "step", undecomposed (see `Autotune.keeps`).
        options: Of autotune.
    """

    def __init__(self, graph: Graph, options: AutotuneOptions):
        self._graph = graph
        self._ensemble = GraphEnsemble(graph, options)
        self._report: GraphReport | None = None
        self._choice: Choice | None = None
        self._program: StepProgram | None = None
        self._lock = threading.Lock()
        self.yields = False
        self.duel = None

    def report_to(self, report: GraphReport) -> None:
        """See `StepProgram.report_to`."""
        self._report = report
        self._ensemble.report_to(report)

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        if self._program is None:
            with self._lock, private.disable_current_modes(), torch.no_grad():
                self._program = self._program or self._choose(inputs)
        self.launches += 1
        try:
            self._program(inputs, taken)
        except StepCaptureError:  # parameters or state are lost: eager cannot go on
            raise
        except Exception as error:
            if taken or self._choice is None or self._choice.winner in NOT_COMPILED:
                raise
            eager = self._eager()
            eager(inputs, taken)  # raises too where the inputs are to blame
            self._program = eager
            self._replace(self._choice, brief_error(error))

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        assert self._program is not None
        return self._program.outputs(taken)

    def _choose(self, inputs: Sequence[Tensor]) -> StepProgram:
        for _ in range(2):  # if what was decided before fails, there is a contest
            choice = self._choice = self._ensemble.choose(list(inputs))
            if choice.winner in NOT_COMPILED:
                break
            try:
                program = self._compile(self._ensemble.candidate(choice.winner))
            except Exception as error:
                text = brief_error(error)
                log.warning("autotune chooses anew, %s failed: %s", choice.winner, text)
                self._ensemble.forget()
            else:
                self._ensemble.note(choice)
                if all(row.name != FUNCTION for row in choice.candidates):
                    self.duel = Duel(self._settle)
                return program
        else:
            choice = self._choice = choice._replace(winner=EAGER)
        self._ensemble.note(choice)
        self.yields = True
        return self._eager()

    def _settle(self, compiled: float, eager: float) -> None:
        """Notes who was faster on real steps, also on disk."""
        assert self._choice is not None
        assert self.duel is not None
        COUNTS.samples += len(self.duel.compiled) + len(self.duel.eager)
        self.duel, self.yields = None, eager_wins(compiled, eager)
        winner, rows = self._choice
        took = f"{compiled * 1e3:.3g} ms against {eager * 1e3:.3g} ms in real steps"
        if self.yields:
            rows = tuple(replace(r, reason=took) if r.name == winner else r for r in rows)
            winner, self._program = FUNCTION, self._eager()
        why = "" if self.yields else f"{winner} took {took}"
        self._choice = Choice(winner, (*rows, CandidateReport(FUNCTION, why, seconds=eager)))
        self._ensemble.settle(self._choice)

    def _compile(self, candidate: Candidate) -> StepProgram:
        try:
            return self._written_over(candidate)
        except DynamoBackendsError as error:
            log.debug("%s copies the results of a step: %s", candidate.name, error)
        return CopyingProgram(self._graph, self._ensemble.build(candidate))

    def _written_over(self, candidate: Candidate) -> StepProgram:
        if candidate.owner != "ours":
            from dynamo_backends.inductor.decompositions import decompositions as inductors
            from dynamo_backends.inductor.steps import compile_step_graph

            return compile_step_graph(retrace(self._graph, inductors()))
        backend, options = self._ensemble.compiler(candidate)
        return compile_whole(backend, options, decomposed(self._graph, dialect(backend, options)))

    def _eager(self) -> StepProgram:
        module = self._graph.module
        return CopyingProgram(self._graph, lambda inputs: module(*inputs))

    def _replace(self, choice: Choice, reason: str) -> None:
        COUNTS.replaced += 1
        self.duel, self.yields = None, True
        self._ensemble.forget()
        self._choice = choice._replace(winner=EAGER)
        text = f"{choice.winner} failed in a step: {reason}"
        log.warning("%s; steps run in eager from now on", text)
        if self._report is not None:
            self._report.runtime_fallbacks.append(text)
            self._report.chosen = EAGER
