"""The conditions under which the program of a recording may run: checked before each call of it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dynamo_backends._torch_private import TensorProperties
from dynamo_backends.aot.step.program.recording import Recording
from dynamo_backends.aot.step.state.inventory import Inventory


class Guards:
    """The conditions under which a recording may be used again.

    Args:
        inventory: What lives on.
        recording: The recording.
    """

    def __init__(self, inventory: Inventory, recording: Recording):
        tensors = inventory.tensors
        self._properties = TensorProperties(tensors)
        self._leaves = [i for i in recording.leaves if i not in recording.free]
        self._have_gradients = [tensors[i].grad is not None for i in self._leaves]
        self._with = recording.gradient_slots
        self._gradient_kinds = self._kinds_of_gradients(tensors)
        self._answers = recording.answers
        self._living = recording.living
        self._asked = {i for answer in recording.answers for i in answer.term.living()}
        self._numbers: tuple[float, ...] | None = None
        self._aliases = recording.aliases

    def why_not(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> str | None:
        """Returns why the recording cannot be used; None if it can.

        Args:
            tensors: One per slot.
            numbers: The numbers of this step.
        """
        if not self._properties.hold(tensors):
            return "a parameter, buffer or state has another shape, layout, dtype or requires_grad"
        if [tensors[i].grad is not None for i in self._leaves] != self._have_gradients:
            return "there are gradients where there were none, or the other way round"
        if self._with and self._kinds_of_gradients(tensors) != self._gradient_kinds:
            return "a gradient has another layout or dtype"
        values = self._values(tensors, numbers)
        if values != self._numbers:
            if not all(answer.holds(values) for answer in self._answers):
                return "a number that the step asks for (such as weight_decay != 0) changed"
            self._numbers = values
        if not self._aliases.hold(tensors):
            return "tensors share memory in another way, or have moved"
        return None

    def _kinds_of_gradients(self, tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
        return [_kind(tensors[i].grad) for i in self._with]

    def _values(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> tuple[float, ...]:
        """Returns the numbers, and behind them the living tensors that the step asked about."""
        if not self._asked:
            return numbers
        first = len(numbers)
        return (
            *numbers,
            *(
                tensors[slot].item() if i in self._asked else 0
                for i, slot in enumerate(self._living, first)
            ),
        )


def _kind(tensor: Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return ()
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()
