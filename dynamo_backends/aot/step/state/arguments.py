"""The arguments of a step: their leaves, also those of dataclasses and other objects."""

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import storage_id
from dynamo_backends.aot.step.state.aliases import overlapping

_CONTAINERS = (list, dict, set, deque, bytearray, np.ndarray)
"""Classes of objects that C code can change in place."""

_SIMPLE = (
    bool, int, float, complex, str, bytes, type(None), type(...), enum.Enum, np.generic, range,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


def is_simple(value: Any) -> bool:
    """Returns whether a value is told from others by comparing it: a number, a flag, a string."""
    return isinstance(value, _SIMPLE)


@dataclass(frozen=True)
class BatchSpec:
    """The structure of a batch, by which its leaves are put together.

    Attributes:
        outer: Lists, tuples, dicts and what else torch's pytrees know.
        objects: One per leaf of these: how an object is put together of further leaves, or None.
    """

    outer: Any
    objects: tuple["_Object | None", ...]


@dataclass(frozen=True)
class _Object:
    """An object whose attributes (and items, if it is a dict) are taken for it."""

    kind: type
    names: tuple[str, ...]
    inner: BatchSpec
    count: int


def flatten_batch(batch: Any) -> tuple[list[Any], BatchSpec]:
    """Returns the leaves of a step's arguments.

    An object that torch's pytrees do not know, such as a dataclass, is taken for its attributes: a
    batch object may be new at each call, or the same with other tensors in it.
    """
    leaves, outer = pytree.tree_flatten(batch)
    if all(isinstance(x, Tensor | int | float | str | None) for x in leaves):
        return leaves, BatchSpec(outer, (None,) * len(leaves))
    flat: list[Any] = []
    objects: list[_Object | None] = []
    for leaf in leaves:
        found = _attributes(leaf)
        if found is None:
            flat.append(leaf)
            objects.append(None)
            continue
        inner, spec = flatten_batch(list(found.values()))
        flat += inner
        objects.append(_Object(type(leaf), tuple(found), spec, len(inner)))
    return flat, BatchSpec(outer, tuple(objects))


def unflatten_batch(flat: Sequence[Any], spec: BatchSpec) -> Any:
    """Puts arguments together; objects are made anew, of the same class."""
    remaining = iter(flat)
    return _unflatten(remaining, spec)


def _unflatten(remaining: Any, spec: BatchSpec) -> Any:
    leaves = []
    for each in spec.objects:
        if each is None:
            leaves.append(next(remaining))
        else:
            values = _unflatten(remaining, each.inner)
            leaves.append(_make(each, values))
    return pytree.tree_unflatten(leaves, spec.outer)


def _make(spec: _Object, values: Sequence[Any]) -> Any:
    made: Any = object.__new__(spec.kind)
    for name, value in zip(spec.names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


_WHOLE = (
    nn.Module, torch.optim.Optimizer, type, FunctionType, MethodType, ModuleType, torch.Generator,
)  # fmt: skip


def _attributes(leaf: Any) -> dict[str, Any] | None:
    """Returns an object's attributes, if it is nothing else; None to keep it whole."""
    if isinstance(leaf, (Tensor, *_WHOLE)) or is_simple(leaf) or hasattr(type(leaf), "__next__"):
        return None
    if isinstance(leaf, _CONTAINERS):
        return None
    attributes = getattr(leaf, "__dict__", None)
    if not isinstance(attributes, dict) or "__new__" in _defined(type(leaf)):
        return None
    return dict(attributes)


def _defined(kind: type) -> set[str]:
    """Returns what a class and those it extends define, apart from `object`."""
    return {name for each in kind.__mro__[:-1] for name in vars(each)}


def shared_memory(batch: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Groups the batch's tensors that overlap in memory, or are the same tensor.

    Of each leaf the position of the first one that is the same tensor follows.
    """
    storages = [storage_id(x) for x in batch if isinstance(x, Tensor)]
    if None not in storages and len(set(storages)) == len(storages):
        return ()
    tensors = {i: x for i, x in enumerate(batch) if isinstance(x, Tensor)}
    groups = overlapping({(i, False): x for i, x in tensors.items()})
    found = [tuple(i for i, _ in group) for group in groups]
    return tuple(group + first_of_each(tensors, group) for group in found)


def first_of_each(tensors: Mapping[int, Tensor], places: Iterable[int]) -> tuple[int, ...]:
    """Returns for each place the first place that has the same tensor."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensors[i]), i) for i in places)


class IdentityKey:
    """Wraps an object so that it is hashed and compared by identity."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        """Returns whether it is the same object."""
        return isinstance(other, IdentityKey) and other._value is self._value

    def __hash__(self) -> int:
        """Returns the object's id."""
        return id(self._value)
