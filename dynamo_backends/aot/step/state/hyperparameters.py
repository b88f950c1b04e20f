"""The hyper-parameters of optimizers: which are inputs of a step, and which it is compiled for.

What an entry of `param_groups` is follows from the optimizer's defaults, not from the type that it
has at the moment: a learning rate stays an input if it becomes 0 or a numpy scalar. A 0-d tensor is
an input, too, by a slot of its own, as it keeps its dtype and may be written to. Everything else is
a constant of the graph, and guarded.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from dynamo_backends.aot.step.state.arguments import IdentityKey

Group = MutableMapping[str, Any]
Place = tuple[Group, str, int | None]

# Settings of torch's own optimizers that say what is computed, not with which number. Muon
# multiplies bfloat16 matrices with its coefficients, where another order of rounding shows.
_STRUCTURE = {"Muon": ("ns_coefficients", "ns_steps")}

# What a constant is compared by value for; of other objects only the identity is known.
_VALUES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)


def value_at(group: Mapping[str, Any], key: str, index: int | None) -> Any:
    """Returns an entry of a group, or an element of one that is a list or a tuple."""
    return group[key] if index is None else group[key][index]


def group_numbers(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Place]:
    """Returns the places of numbers that become inputs: group, key, and index in a tuple."""
    for optimizer, group, key, index, value in _entries(optimizers):
        if _is_input(optimizer, key, index, value):
            yield group, key, index


def read_number(place: Place) -> Any:
    """Returns the number at a place of `group_numbers`: a Python number, or a numpy scalar."""
    value = value_at(*place)
    return value[()] if isinstance(value, numpy.ndarray) else value


def read_numbers(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Returns the numbers at all places of `group_numbers`."""
    return [read_number(place) for place in group_numbers(optimizers)]


def group_tensors(optimizer: torch.optim.Optimizer, group: Group) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors that become slots, each with its place as a user writes it."""
    for key, index, value in _of_group(group):
        if isinstance(value, Tensor) and not _is_structure(optimizer, key):
            yield (f"[{key!r}]" if index is None else f"[{key!r}][{index}]"), value


def group_structure(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[Group, str, int | None, Any]]:
    """Returns where tensors are that are constants of the graph, and what Python number each is."""
    for optimizer, group, key, index, value in _entries(optimizers):
        if isinstance(value, Tensor) and _is_structure(optimizer, key):
            yield group, key, index, value.item()


def replace(group: Group, key: str, index: int | None, value: Any) -> None:
    """Sets an entry; a list or tuple that it is an element of is made anew."""
    if index is None:
        group[key] = value
        return
    before = group[key]
    changed = [*before[:index], value, *before[index + 1 :]]
    make: Callable[[Any], Any] = getattr(type(before), "_make", type(before))
    group[key] = make(changed)


@contextlib.contextmanager
def restoring_groups(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside: entries of groups may be replaced; afterwards they are what they were."""
    saved = [(group, dict(group)) for o in optimizers for group in o.param_groups]
    try:
        yield
    finally:
        for group, values in saved:
            group.update(values)


def group_constants(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Any, ...]:
    """Returns what of the optimizers a compiled step is specialized on."""
    found: list[Any] = [
        (key, index, _fixed(optimizer, key, index, value))
        for optimizer, _, key, index, value in _entries(optimizers)
    ]
    found += [
        (key, _constant(value))
        for optimizer in optimizers
        for state in optimizer.state.values()
        if isinstance(state, Mapping)
        for key, value in state.items()
        if not isinstance(value, Tensor)
    ]
    return tuple(found)


Entry = tuple[torch.optim.Optimizer, Group, str, int | None, Any]


def _entries(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Entry]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, index, value in _of_group(group):
                yield optimizer, group, key, index, value


def _of_group(group: Group) -> Iterator[tuple[str, int | None, Any]]:
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, list | tuple):
            for index, element in enumerate(value):
                yield key, index, element
        else:
            yield key, None, value


def _is_input(optimizer: torch.optim.Optimizer, key: str, index: int | None, value: Any) -> bool:
    if not _is_number(value) or _is_structure(optimizer, key):
        return False
    default = optimizer.defaults.get(key)
    if index is not None:
        is_like = isinstance(default, list | tuple) and index < len(default)
        default = default[index] if is_like else None  # type: ignore[index]
    if isinstance(default, bool | numpy.bool_):
        return False
    if _is_real(value) or _is_real(default):
        return True
    # An integer where one is expected may be a count, or 0 for a number such as weight_decay.
    return type(optimizer).__module__.startswith("torch.optim")


def _is_structure(optimizer: torch.optim.Optimizer, key: str) -> bool:
    return key in _STRUCTURE.get(type(optimizer).__name__, ())


def _is_number(value: Any) -> bool:
    """Returns whether a value is a Python number, or one of numpy's; flags are none."""
    if isinstance(value, numpy.ndarray):
        return value.ndim == 0 and value.dtype.kind in "iuf"
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float | numpy.integer | numpy.floating)


def _is_real(value: Any) -> bool:
    """Returns whether a value is a number that is no integer by its type."""
    if isinstance(value, Tensor):
        return value.is_floating_point()
    if isinstance(value, numpy.ndarray):
        return value.dtype.kind == "f"
    return isinstance(value, float | numpy.floating)


def _fixed(optimizer: torch.optim.Optimizer, key: str, index: int | None, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if _is_structure(optimizer, key) else Tensor
    if _is_input(optimizer, key, index, value):
        return value.dtype.name if isinstance(value, numpy.generic | numpy.ndarray) else float
    return _constant(value)


def _constant(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_constant, value))
    if isinstance(value, Mapping):
        return type(value), tuple((_constant(k), _constant(v)) for k, v in value.items())
    if isinstance(value, (*_VALUES, numpy.generic)):
        return type(value), value
    return IdentityKey(value)


class OptimizerSettings:
    """The settings of an optimizer, read again only if one is another object."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._values: list[Any] = []
        self._constants: tuple[Any, ...] = ()
        self._numbers: list[Any] = []
        self._is_plain = False

    def read(self) -> tuple[tuple[Any, ...], list[Any]]:
        """Returns what is compared, and the numbers that are inputs."""
        values: list[Any] = []
        for group in self._optimizer.param_groups:
            values += group.values()
        before = self._values
        is_same = len(values) == len(before) and all(map(operator.is_, values, before))
        if not (is_same and self._is_plain):
            self._values = values
            self._constants = group_constants([self._optimizer])
            self._numbers = read_numbers([self._optimizer])
            self._is_plain = self._has_only_tensors(values)
        return self._constants, self._numbers

    def _has_only_tensors(self, values: list[Any]) -> bool:
        """Returns whether nothing that was read changes without being another object."""
        fixed = (int, float, str, bool, tuple, type(None))
        is_fixed = all(
            isinstance(v, fixed) or (isinstance(v, list) and all(isinstance(p, Tensor) for p in v))
            for v in values
        )
        states = self._optimizer.state.values()
        return is_fixed and all(
            isinstance(x, Tensor)
            for state in states
            if isinstance(state, Mapping)
            for x in state.values()
        )
