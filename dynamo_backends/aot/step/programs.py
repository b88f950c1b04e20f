"""Compiled steps: run once, they update their inputs in place and return the rest."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph


class StepProgram(ABC):
    """A compiled graph of the kind "step".

    Attributes:
        launches: How many executables it has launched.
    """

    launches: int = 0

    @abstractmethod
    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs one step.

        Args:
            inputs: One per input of the graph. Those with `Input.updated_by` get their new
                contents, all of them or, if it raises, none.

        Returns:
            The graph's other outputs.
        """


class CopyingProgram(StepProgram):
    """A functional program whose results are copied to where they belong, all in one call.

    Args:
        graph: The graph.
        run: From its inputs to all its outputs.
    """

    def __init__(self, graph: Graph, run: Callable[[list[Tensor]], Sequence[Any]]):
        self._run = run
        self._updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See `StepProgram.__call__`."""
        count = len(self._updated)
        with torch.no_grad():
            self.launches += 1
            results = list(self._run(list(inputs)))
            updated = [inputs[i] for i in self._updated]
            if updated:
                torch._foreach_copy_(updated, results[:count])
        return results[count:]
