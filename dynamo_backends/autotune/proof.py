"""Whether a step that writes over its inputs does what the step's graph does in eager.

What backends make of a step is not what they make of the functional graph that competes, so it is
proven right by itself, by the same rule and before it takes a real step.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.programs import CopyingProgram, StepProgram
from dynamo_backends.autotune.arguments import Arguments
from dynamo_backends.autotune.functional import weight_places
from dynamo_backends.autotune.session import Subject
from dynamo_backends.autotune.verify import Trial, judge
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.tuning.counts import COUNTS
from dynamo_backends.tuning.race import Run
from dynamo_backends.verify import in_float64, restore_rng, snapshot_rng


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
