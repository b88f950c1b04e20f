"""Runs fusions on torch's memory and torch's current stream."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.nvfuser.compiler import LoweredFusion
from dynamo_backends.runtime.results import restride


class Reader:
    """Hands over one input as the fusion was told that it would be.

    Args:
        position: Among the graph's inputs.
        value: The fake tensor that the fusion was made for.
        device: Where the fusion runs.
    """

    def __init__(self, position: int, value: Tensor, device: torch.device):
        self._position = position
        self._shape = value.shape
        self._strides = value.stride()
        self._dtype = value.dtype
        self._device = device

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the tensor; a copy where its strides are others, or of a number on the CPU.

        Raises:
            ValueError: Shape or type differ from what was compiled.
        """
        tensor = values[self._position]
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ValueError(
                f"the executable was compiled for {self._dtype}{list(self._shape)}, but called "
                f"with {tensor.dtype}{list(tensor.shape)}"
            )
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        if tensor.device != self._device:
            tensor = tensor.to(self._device)
        return tensor if tensor.stride() == self._strides else restride(tensor, self._strides)


class Launch:
    """A call of a fusion.

    Args:
        graph: That was lowered.
        lowered: How the fusion is called.
        fusion: A closed `FusionDefinition`.
    """

    def __init__(self, graph: Graph, lowered: LoweredFusion, fusion: Any):
        values = [p.meta["val"] for p in graph.placeholders]
        self._fusion = fusion
        self.program = lowered.program
        self._readers = [Reader(i, values[i], lowered.device) for i in lowered.inputs]
        self._outputs = lowered.outputs

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """Runs it on all inputs of the graph."""
        inputs = [read(values) for read in self._readers]
        made = list(self._fusion.execute(inputs))
        if self.program.moved:
            _separate(made, self.program.moved, inputs)
        return [made[i] if i >= 0 else values[-1 - i] for i in self._outputs]


def _separate(made: list[Tensor], moved: Sequence[int], inputs: Sequence[Tensor]) -> None:
    """Gives results that share memory with an input or with each other memory of their own."""
    taken = {t.untyped_storage().data_ptr() for t in inputs}
    for i in moved:
        address = made[i].untyped_storage().data_ptr()
        if address in taken:
            made[i] = made[i].clone()
        taken.add(address)
