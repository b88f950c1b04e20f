"""Whole training steps compiled by Inductor: what computes, and what writes the results.

Inductor's programs are Python that calls one loop after the other, so one that writes over
parameters and state as it goes could be stopped halfway. Only the second of the two programs of a
step writes, and nothing stops it (see `phases`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import compile_step_with_inductor
from dynamo_backends.aot.step.phases import separate
from dynamo_backends.aot.step.programs import StepProgram
from dynamo_backends.aot.step.whole import give_up, signals_held
from dynamo_backends.errors import StepCaptureError
from dynamo_backends.graph.graph import Graph


def compile_step_graph(graph: Graph) -> StepProgram:
    """A step as two programs of Inductor's."""
    return InductorStep(graph)


class InductorStep(StepProgram):
    """A step compiled by Inductor.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph):
        phases = separate(graph)
        self._updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self._handed = phases.handed
        self._rest = phases.rest
        self._compute = _compiled(phases.compute)
        self._write = _compiled(phases.write)

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        updated = [inputs[i] for i in self._updated]
        # Not torch.no_grad(), which a signal at the wrong moment would leave on.
        apart = [x.detach() for x in inputs]
        written = [apart[i] for i in self._rest]
        self.launches += 1
        results = list(self._compute(apart))
        arguments = [*results[: self._handed], *written]
        del results[: self._handed]
        torch.autograd.graph.increment_version(updated)
        with signals_held():
            self._overwrite(arguments, updated)
            taken.append(results)

    def _overwrite(self, arguments: list[Tensor], updated: list[Tensor]) -> None:
        try:
            self._write(arguments)
        except Exception as error:
            give_up(updated)
            raise StepCaptureError(
                f"writing the results of a step failed ({error}) and its {len(updated)} "
                "parameters and states are lost; they are NaN now. Load the last checkpoint."
            ) from error

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        results: list[Tensor] = taken[0]
        return results


def _compiled(module: fx.GraphModule) -> Any:
    inputs: list[Any] = [p.meta["val"] for p in module.graph.find_nodes(op="placeholder")]
    return compile_step_with_inductor(module, inputs)
