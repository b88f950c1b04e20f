"""The tensors that live from step to step, and the backend on whose devices they are."""

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamo_backends.aot.step.mesh.across import begin_alike, ranks_of
from dynamo_backends.aot.step.program.backends import StepBackend, step_backend
from dynamo_backends.aot.step.program.optimizers import create_state
from dynamo_backends.aot.step.program.recording import Definition
from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.interface.errors import StepCaptureError
from dynamo_backends.runtime.device_moves import move_together
from dynamo_backends.runtime.device_values import home_named
from dynamo_backends.runtime.residency import home_of


class Change(NamedTuple):
    """The changes since the call before.

    Attributes:
        replaced: Tensors, and those that have taken their place.
        is_like: Whether these can take the place of all that were there.
    """

    replaced: list[tuple[Tensor, Tensor]]
    is_like: bool


class StepState:
    """The parameters, buffers and states of optimizers of a step.

    Attributes:
        backend: What compiles the step.
        tensors: What lives on.
        ids: The ids of these.
    """

    def __init__(self, definition: Definition, backend: str, options: Mapping[str, Any] | None):
        mesh = None if definition.parallel is None else definition.parallel.mesh
        self.backend: StepBackend = step_backend(backend, options, mesh=mesh)
        self.tensors: list[Tensor] = []
        self.ids: dict[int, Any] = {}
        self._definition = definition
        self._options = options
        self._inventory: Inventory | None = None

    @property
    def inventory(self) -> Inventory:
        """The tensors that live on, with names; after `refresh`."""
        assert self._inventory is not None
        return self._inventory

    def refresh(self) -> Change | None:
        """Looks for other tensors than there were, and moves them to the backend's devices.

        Returns:
            What has changed; None: nothing.

        Raises:
            StepCaptureError: On a mesh an optimizer makes its state in a way of its own.
        """
        before, old = self._inventory, self.tensors
        if before is not None and before.is_current():
            return None
        self._create_state_on_mesh()
        self._inventory = now = Inventory(self._definition.models, self._definition.optimizers)
        is_like = before is not None and before.is_like(now)
        if is_like and all(map(operator.is_, old, now.tensors)):
            return None
        self._move(now)
        self.tensors = now.tensors
        self.ids = dict.fromkeys(map(id, self.tensors))
        if before is None:
            return Change([], False)
        were = dict(zip(before.slots, old, strict=True))
        pairs = zip(now.slots, now.tensors, strict=True)
        replaced = [(were[slot], t) for slot, t in pairs if were.get(slot, t) is not t]
        return Change(replaced, is_like)

    def _create_state_on_mesh(self) -> None:
        """No first step in eager makes the optimizers' state there."""
        if self._definition.parallel is None:
            return
        strange = [o for o in self._definition.optimizers if not create_state(o)]
        if strange:
            raise StepCaptureError(
                f"a step on a mesh cannot be taken in eager, as the first of {strange[0]!r}, which "
                "makes its state in a way of its own. Use another optimizer."
            )

    def _move(self, inventory: Inventory) -> None:
        """Moves all that lives on to the backend's devices, if it has some."""
        definition, target = self._definition, self.backend.target
        if definition.parallel is not None and target is not None:
            ranks = ranks_of(definition.parallel)
            if ranks is not None:
                begin_alike(ranks, definition.parallel, inventory, target.name)
            definition.parallel.settle(inventory, definition.models, definition.optimizers, target)
            return
        found = home_of(inventory.tensors)
        if found is not None and self.backend.home is None:
            self.backend = step_backend(self.backend.name, self._options, found)
        home = self.backend.home
        if home is None:
            return
        pairs = zip(inventory.slots, inventory.tensors, strict=True)
        move_together((t for slot, t in pairs if not slot.is_setting), home_named(home))

    def synchronize(self) -> None:
        """Waits for the GPU, if the tensors are on one."""
        if any(t.is_cuda for t in self.tensors):
            torch.cuda.synchronize()
