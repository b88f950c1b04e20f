"""What lives from step to step: parameters, buffers, optimizer state, and where each is kept."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.aot.step.state.container_snapshot import ContainerSnapshot
from dynamo_backends.aot.step.state.hyperparameters import group_tensors
from dynamo_backends.graph.roles import Role


@dataclass(frozen=True)
class Slot:
    """One tensor that lives from step to step.

    Attributes:
        name: As a user would write it: "model.fc.weight".
        role: PARAMETER, BUFFER or OPTIMIZER_STATE.
        is_setting: Whether it is a hyper-parameter.
    """

    name: str
    role: Role
    is_setting: bool = False


class Inventory:
    """Every tensor of the models and optimizers, each once.

    Args:
        models: Whose parameters and buffers are kept.
        optimizers: Whose parameters and state are kept.

    Attributes:
        tensors: One per slot.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ):
        self.slots: list[Slot] = []
        self._places: list[tuple[Any, Any]] = []
        self._slot_of_place: list[int] = []
        known: dict[int, int] = {}
        places = [*_in_models(models), *_in_optimizers(optimizers, models)]
        for slot, container, key in places:
            tensor = container[key]
            if id(tensor) not in known:
                known[id(tensor)] = len(self.slots)
                self.slots.append(slot)
            self._places.append((container, key))
            self._slot_of_place.append(known[id(tensor)])
        self._models = models
        self._optimizers = optimizers
        self._snapshot = ContainerSnapshot(models, optimizers)
        self._owners = list(_owners(optimizers))
        self._containers = [*_in_modules(models), *self._owners]
        self._lengths = list(map(len, self._containers))
        self._tables = [m._modules for model in models for m in model.modules()]
        self._children = self._submodules()
        self._settings = _settings(optimizers)
        self._first = [self._slot_of_place.index(i) for i in range(len(self.slots))]
        self._is_parameter = [slot.role is Role.PARAMETER for slot in self.slots]
        self._seen = self._read()
        self.tensors = [self._seen[i] for i in self._first]

    def _read(self) -> list[Tensor]:
        return [container[key] for container, key in self._places]

    def _submodules(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self._tables)))

    def refresh(self) -> list[Tensor] | None:
        """Returns the tensors of now, one per slot; None if there are others than there were."""
        if not self._snapshot.is_current():
            tensors = self._find_tensors()
            if tensors is None:
                return None
            self._snapshot = ContainerSnapshot(self._models, self._optimizers)
        return self.tensors

    def _find_tensors(self) -> list[Tensor] | None:
        owners = list(_owners(self._optimizers))
        if len(owners) != len(self._owners) or not all(map(operator.is_, owners, self._owners)):
            return None  # Optimizer.load_state_dict makes new ones
        if list(map(len, self._containers)) != self._lengths:
            return None
        if not all(map(operator.is_, self._submodules(), self._children)):
            return None
        if _settings(self._optimizers) != self._settings:
            return None
        try:
            found = self._read()
        except (KeyError, IndexError):
            return None
        if not all(map(operator.is_, found, self._seen)):
            tensors = [found[i] for i in self._first]
            if not all(isinstance(t, Tensor) for t in tensors):
                return None
            if any(t is not tensors[i] for t, i in zip(found, self._slot_of_place, strict=True)):
                return None  # what was one tensor is two, or the other way round
            if len({id(t) for t in tensors}) != len(tensors):
                return None
            self._seen, self.tensors = found, tensors
        return self.tensors

    def is_like(self, other: "Inventory") -> bool:
        """Returns whether the tensors of another inventory can take the place of these."""
        ours, theirs = self._children, other._children
        return (
            self.slots == other.slots
            and self._slot_of_place == other._slot_of_place
            and len(ours) == len(theirs)
            and all(map(operator.is_, ours, theirs))
        )

    def parameters(self) -> list[int]:
        """Positions of the slots that are parameters."""
        return [i for i, slot in enumerate(self.slots) if slot.role is Role.PARAMETER]

    def requires_grad(self) -> bytes:
        """Returns which of the parameters have gradients, one byte for each."""
        return bytes(map(_REQUIRES_GRAD, itertools.compress(self.tensors, self._is_parameter)))


_REQUIRES_GRAD = operator.attrgetter("requires_grad")

Place = tuple[Slot, Any, Any]


def _in_models(models: Sequence[nn.Module]) -> Iterator[Place]:
    for number, model in enumerate(models):
        prefix = "model" if len(models) == 1 else f"model[{number}]"
        for path, module in model.named_modules(remove_duplicate=False):
            start = f"{prefix}.{path}" if path else prefix
            for container, role in (
                (module._parameters, Role.PARAMETER),
                (module._buffers, Role.BUFFER),
            ):
                for key, value in container.items():
                    if value is not None:
                        yield Slot(f"{start}.{key}", role), container, key


def _in_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]
) -> Iterator[Place]:
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        prefix = "optimizer" if len(optimizers) == 1 else f"optimizer[{number}]"
        for i, group in enumerate(optimizer.param_groups):
            at = f"{prefix}.param_groups[{i}]"
            for j, p in enumerate(group["params"]):
                yield Slot(f"{at}['params'][{j}]", Role.PARAMETER), group["params"], j
                state = optimizer.state.get(p, {})
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        name = f"{prefix}.state[{names.get(id(p), f'{i}.{j}')}]['{key}']"
                        yield Slot(name, Role.OPTIMIZER_STATE), state, key
            for container, key, name in group_tensors(optimizer, group):
                yield Slot(f"{at}{name}", Role.BUFFER, is_setting=True), container, key


def _settings(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[int, str]]:
    """Returns which hyper-parameters are tensors now."""
    return [
        (number, name)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for _, _, name in group_tensors(optimizer, group)
    ]


def _in_modules(models: Sequence[nn.Module]) -> Iterator[Any]:
    """Whatever would grow or shrink if a module's tensors were added or taken away."""
    for model in models:
        for module in model.modules():
            yield from (module._parameters, module._buffers, module._modules)


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Any]:
    """Whatever would grow, shrink or be replaced if an optimizer's tensors were."""
    for optimizer in optimizers:
        state = optimizer.state
        yield state
        yield optimizer.param_groups
        for group in optimizer.param_groups:
            yield group
            yield group["params"]
            yield from (state[p] for p in group["params"] if p in state)
