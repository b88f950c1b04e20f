"""Lists what lives from step to step: parameters, buffers, optimizer state."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dynamo_backends.aot.step.state.hyperparameters import group_tensors
from dynamo_backends.graph.graph import Role


class Slot(NamedTuple):
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
    """Every tensor of the models and optimizers, each listed once."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ):
        self.slots: list[Slot] = []
        self.tensors: list[Tensor] = []
        self._slot_of_place: list[int] = []
        known: dict[int, int] = {}
        names: dict[int, str] = {}
        for slot, tensor in (*_in_models(models, names), *_in_optimizers(optimizers, names)):
            number = known.setdefault(id(tensor), len(known))
            if number == len(self.slots):
                self.slots.append(slot)
                self.tensors.append(tensor)
            self._slot_of_place.append(number)
        self._modules = [module for model in models for module in model.modules()]
        self._is_parameter = [slot.role is Role.PARAMETER for slot in self.slots]
        self._snapshot = ContainerSnapshot(self._modules, optimizers)

    def is_current(self) -> bool:
        """Returns whether models and optimizers still have these tensors, and no others."""
        return self._snapshot.is_current()

    def is_like(self, other: "Inventory") -> bool:
        """Returns whether the tensors of another inventory can take the place of these."""
        return (
            self.slots == other.slots
            and self._slot_of_place == other._slot_of_place
            and _same(self._modules, other._modules)
        )

    def parameters(self) -> list[int]:
        """Positions of the slots that are parameters."""
        return [i for i, is_parameter in enumerate(self._is_parameter) if is_parameter]

    def requires_grad(self) -> bytes:
        """Returns which of the parameters have gradients, one byte for each."""
        return bytes(map(_REQUIRES_GRAD, itertools.compress(self.tensors, self._is_parameter)))


_REQUIRES_GRAD = operator.attrgetter("requires_grad")

Place = tuple[Slot, Tensor]


def _in_models(models: Sequence[nn.Module], names: dict[int, str]) -> Iterator[Place]:
    """Yields parameters and buffers; notes the names of parameters in their models."""
    for number, model in enumerate(models):
        prefix = "model." if len(models) == 1 else f"model[{number}]."
        for path, module in model.named_modules(remove_duplicate=False):
            start = f"{path}." if path else ""
            for key, value in module._parameters.items():
                if value is not None:
                    names.setdefault(id(value), start + key)
                    yield Slot(prefix + start + key, Role.PARAMETER), value
            for key, value in module._buffers.items():
                if value is not None:
                    yield Slot(prefix + start + key, Role.BUFFER), value


def _in_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
) -> Iterator[Place]:
    for number, optimizer in enumerate(optimizers):
        prefix = "optimizer" if len(optimizers) == 1 else f"optimizer[{number}]"
        states = optimizer.state
        for i, group in enumerate(optimizer.param_groups):
            at = f"{prefix}.param_groups[{i}]"
            for j, p in enumerate(group["params"]):
                yield Slot(f"{at}['params'][{j}]", Role.PARAMETER), p
                if p in states:
                    name = f"{prefix}.state[{names.get(id(p)) or f'{i}.{j}'}]"
                    for key, value in states[p].items():
                        if isinstance(value, Tensor):
                            yield Slot(f"{name}['{key}']", Role.OPTIMIZER_STATE), value
            for name, tensor in group_tensors(optimizer, group):
                yield Slot(at + name, Role.BUFFER, is_setting=True), tensor


_PLAIN = frozenset((int, float, bool, str, type(None), np.float64, np.float32, np.int64, np.int32))
_chain = itertools.chain.from_iterable


class ContainerSnapshot:
    """The contents of modules and optimizers at one moment.

    Numbers and other plain settings in `param_groups`, and what is no tensor in the state of a
    parameter, may change.

    Args:
        modules: Whose submodules, parameters and buffers are meant.
        optimizers: Whose groups, parameters and state are meant.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        tables: list[Any] = [
            table for m in modules for table in (m._parameters, m._buffers, m._modules)
        ]
        self._tables = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._optimizers = [_OptimizerContents(optimizer) for optimizer in optimizers]
        self._in_modules = self._read()

    def _read(self) -> list[Any]:
        return [*_chain(map(dict.values, self._tables))]

    def is_current(self) -> bool:
        """Returns whether they hold the same objects now."""
        is_same = not any(self._empty) and _same(self._read(), self._in_modules)
        return is_same and all(optimizer.is_current() for optimizer in self._optimizers)


class _OptimizerContents:
    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._state = optimizer.state
        self._groups = optimizer.param_groups
        self._each = list(self._groups)
        self._settings = self._read_settings()
        self._parameters = self._read_parameters()
        self._owners = list(self._state)
        self._states: list[Any] = list(self._state.values())
        self._lists = [
            (value, list(value)) for group in self._each for key, value in group.items()
            if isinstance(value, list) and key != "params"
        ]  # fmt: skip
        self._is_readable = all(type(state) is dict for state in self._states)
        self._readers: list[tuple[Any, list[Any]]] = []
        if self._is_readable:
            self._lengths = list(map(len, self._states))
            self._readers = _readers(self._states)
            self._tensors = self._read_tensors()

    def _read_settings(self) -> list[Any]:
        return [*_chain(map(dict.values, self._each))]

    def _read_parameters(self) -> list[Any]:
        return [*_chain(group["params"] for group in self._each)]

    def _read_tensors(self) -> list[Any]:
        return [*_chain(_chain(map(get, states)) for get, states in self._readers)]

    def is_current(self) -> bool:
        optimizer, state = self._optimizer, self._state
        if not self._is_readable or optimizer.state is not state:
            return False
        if optimizer.param_groups is not self._groups or not _same(self._groups, self._each):
            return False
        if not self._has_same_settings() or not _same(self._read_parameters(), self._parameters):
            return False
        if not (_same(state, self._owners) and _same(state.values(), self._states)):
            return False
        try:
            return list(map(len, self._states)) == self._lengths and _same(
                self._read_tensors(), self._tensors
            )
        except KeyError:
            return False

    def _has_same_settings(self) -> bool:
        now, before = self._read_settings(), self._settings
        return (_same(now, before) or _all_alike(now, before)) and all(
            _all_alike(value, contents) for value, contents in self._lists
        )


def _all_alike(now: Any, before: Any) -> bool:
    """Returns whether two collections have the same objects, but for numbers and flags."""
    return len(now) == len(before) and all(map(_is_alike, now, before))


def _is_alike(a: Any, b: Any) -> bool:
    if a is b or (type(a) in _PLAIN and type(b) in _PLAIN):
        return True
    return type(a) is type(b) and isinstance(a, list | tuple) and _all_alike(a, b)


def _readers(states: Iterable[dict[Any, Any]]) -> list[tuple[Any, list[Any]]]:
    """Returns functions that read the tensors of states with the same keys."""
    by_keys: dict[tuple[Any, ...], list[Any]] = {}
    for state in states:
        keys = tuple(key for key, value in state.items() if isinstance(value, Tensor))
        by_keys.setdefault(keys, []).append(state)
    return [
        (operator.itemgetter(*keys, keys[0]), states) for keys, states in by_keys.items() if keys
    ]


def _same(now: Any, before: Sequence[Any]) -> bool:
    """Returns whether two collections have the same objects, in the same order."""
    return len(now) == len(before) and all(map(operator.is_, now, before))
