"""The gradients that a step finds when it begins, and what becomes of them while it is traced."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from dynamo_backends.aot.step.program.optimizer_calls import TracedOptimizerCalls
from dynamo_backends.aot.step.state.inventory import Inventory


def is_leaf(tensor: Tensor) -> bool:
    """Returns whether a tensor may have a gradient."""
    return tensor.is_leaf and (tensor.requires_grad or tensor.grad is not None)


class Gradients:
    """Gradients of tensors that a step is given.

    Args:
        leaves: The tensors that may have one, by their positions.

    Attributes:
        entering: The gradients that are there when the step begins.
    """

    def __init__(self, leaves: Mapping[int, Tensor]):
        self._leaves = leaves
        self.entering = {i: g for i, t in leaves.items() if (g := t.grad) is not None}
        self._entered: dict[int, Tensor] = {}
        self._fakes: Sequence[Any] = ()

    def attach(self, fakes: Sequence[Any], entering: Mapping[int, Tensor]) -> None:
        """Gives the tensors of a trace the gradients that they have when the step begins."""
        self._fakes = fakes
        for i, gradient in entering.items():
            fakes[i].grad = self._entered[i] = gradient

    def left(self) -> Iterator[tuple[int, Tensor]]:
        """Position and gradient of each tensor to which the traced step gave another one."""
        for i in self._positions():
            fake = self._fakes[i]
            if fake.is_leaf and fake.grad is not None and fake.grad is not self._entered.get(i):
                yield i, fake.grad

    def _positions(self) -> Sequence[int]:
        return list(self._leaves)


class SlotGradients(Gradients):
    """Gradients of what lives from step to step.

    Attributes:
        slots: Those that may have gradients.
    """

    def __init__(self, inventory: Inventory, calls: TracedOptimizerCalls):
        parameters = set(inventory.parameters())
        tensors = enumerate(inventory.tensors)
        super().__init__({i: t for i, t in tensors if i in parameters or is_leaf(t)})
        self.slots = tuple(self._leaves)
        self._tensors = inventory.tensors
        self._calls = calls
        self._accumulated: set[int] = set()

    def attach(self, fakes: Sequence[Any], entering: Mapping[int, Tensor]) -> None:
        """Gives the tensors of a trace these gradients, and notes where others accumulate."""
        super().attach(fakes, entering)
        for i in self._leaves:
            if fakes[i].requires_grad and fakes[i].is_leaf:
                fakes[i].register_post_accumulate_grad_hook(_noting(self, i))

    def _positions(self) -> Sequence[int]:
        return range(len(self._fakes))

    def note(self, slot: int) -> None:
        """A gradient has been accumulated."""
        self._accumulated.add(slot)
        self._calls.begun = True

    def cleared(self) -> tuple[int, ...]:
        """Returns the slots whose gradient the step takes away."""
        changed = self._accumulated | self.entering.keys() | self._cleared_by_call()
        changed |= self._slots_of(self._calls.cleared_late)
        return tuple(i for i in sorted(changed) if self._fakes[i].grad is None)

    def free(self, read: Set[int], asked: Set[int]) -> frozenset[int]:
        """Slots whose gradients at the start do not matter: not asked for, or thrown away.

        Args:
            read: Slots whose gradients the graph reads.
            asked: Ids of the trace's tensors whose gradients Python code has asked for.
        """
        unasked = {i for i in self.slots if id(self._fakes[i]) not in asked} - self._accumulated
        return frozenset((unasked | self._cleared_by_call()) - read)

    def _cleared_by_call(self) -> set[int]:
        return self._slots_of(self._calls.cleared)

    def _slots_of(self, parameters: Set[int]) -> set[int]:
        return {i for i, t in enumerate(self._tensors) if id(t) in parameters}


def _noting(gradients: SlotGradients, slot: int) -> Callable[[Tensor], None]:
    """Returns a hook that keeps no recording alive: torch may keep fakes, and so their hooks."""
    reference = weakref.ref(gradients)

    def note(_: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.note(slot)

    return note
