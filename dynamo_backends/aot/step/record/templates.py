"""Templates: the arguments and results of a recorded call, with numbers in the place of tensors.

A template is a nested structure of `Ref`, `Number`, `Items` and constants.
"""

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamo_backends.interface.errors import DynamoBackendsError


class NotRecordable(DynamoBackendsError):
    """A call that no record can hold; the message says why."""


@dataclass(frozen=True)
class Ref:
    """A tensor, by its number in the trie."""

    value: int


@dataclass(frozen=True)
class Number:
    """A Python number that is an input of the program."""

    index: int
    kind: type
    value: int | float


@dataclass(frozen=True)
class Items:
    """A template of a container among a call's arguments.

    Attributes:
        kind: Its class.
        keys: Keys of a dict.
        items: Templates of its items; for a slice start, stop and step.
    """

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


Template = Any
Place = tuple[int, ...]
"""A leaf of a template: the index at each level."""


_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device,
    torch.layout, torch.memory_format, enum.Enum, np.generic,
)  # fmt: skip
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, MethodType, torch.Generator)
_SEQUENCES = (list, tuple, torch.Size)


def template_of(value: Any, ref: Callable[[Tensor], Ref]) -> Template:
    """Returns the template of a value.

    Raises:
        NotRecordable: It has objects that another call cannot be compared with.
    """
    if isinstance(value, Tensor):
        return ref(value)
    kind = type(value)
    if issubclass(kind, _CONSTANTS) or isinstance(value, _BY_IDENTITY):
        return value
    if kind in _SEQUENCES or (issubclass(kind, tuple) and _is_rebuilt(kind)):
        return Items(kind, (), tuple(template_of(v, ref) for v in value))
    if kind is dict:
        keys = tuple(value)
        return Items(dict, keys, tuple(template_of(v, ref) for v in value.values()))
    if kind is slice:
        parts = value.start, value.stop, value.step
        return Items(slice, (), tuple(template_of(v, ref) for v in parts))
    raise NotRecordable(f"an argument of type {kind.__name__}")


def _is_rebuilt(kind: type) -> bool:
    """Returns whether a class of tuples is made of its items: a named tuple, or torch's results."""
    return hasattr(kind, "_make") or kind.__module__ == "torch.return_types"


def fill(template: Template, value: Callable[[int], Any], number: Callable[[int], Any]) -> Any:
    """Builds a value from its template."""
    if type(template) is Ref:
        return value(template.value)
    if type(template) is Number:
        return number(template.index)
    if type(template) is not Items:
        return template
    items = [fill(item, value, number) for item in template.items]
    if template.kind is dict:
        return dict(zip(template.keys, items, strict=True))
    if template.kind is slice:
        return slice(*items)
    make = getattr(template.kind, "_make", template.kind)
    return items if template.kind is list else make(items)


def leaves(template: Template) -> Iterator[Any]:
    """Returns what is in a template besides containers."""
    if type(template) is Items:
        for item in template.items:
            yield from leaves(item)
    else:
        yield template


def refs(template: Template) -> list[int]:
    """Returns the numbers of the tensors in a template."""
    return [leaf.value for leaf in leaves(template) if type(leaf) is Ref]


def same_constant(a: Any, b: Any) -> bool:
    """Returns whether two constants are equal to torch: signs of zero count, NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, FunctionType):
        return a is b or (a.__code__ is b.__code__ and a.__closure__ == b.__closure__)
    return a is b or (not isinstance(a, _BY_IDENTITY) and bool(a == b))


def differing_numbers(
    template: Template, value: Any, is_same: Callable[[int, Tensor], bool]
) -> list[Place] | None:
    """Returns where a value differs from a template, if it does in numbers only.

    Args:
        template: Template of a call.
        value: The value in another call.
        is_same: Compares a tensor with a number of the trie.

    Returns:
        The leaves that are other numbers of the same type; None if something else differs.
    """
    if type(template) is Ref:
        return [] if isinstance(value, Tensor) and is_same(template.value, value) else None
    if type(template) is Number:
        return [] if type(value) is template.kind else None
    if type(template) is not Items:
        if isinstance(value, Tensor):
            return None
        if same_constant(template, value):
            return []
        is_number = type(value) in (int, float) or isinstance(value, np.integer | np.floating)
        return [()] if is_number and type(template) is type(value) else None
    items = _items_of(template, value)
    if items is None:
        return None
    places: list[Place] = []
    for i, (inner, item) in enumerate(zip(template.items, items, strict=True)):
        below = differing_numbers(inner, item, is_same)
        if below is None:
            return None
        places += [(i, *place) for place in below]
    return places


def _items_of(template: Items, value: Any) -> list[Any] | None:
    kind: Any = type(value)
    if kind is not template.kind:
        return None
    if template.kind is slice:
        return [value.start, value.stop, value.step]
    if template.kind is dict:
        return list(value.values()) if tuple(value) == template.keys else None
    return list(value) if len(value) == len(template.items) else None


def with_number(template: Template, place: Place, make: Callable[[Any], Number]) -> Template:
    """Returns a template whose constant at a place is an input."""
    if not place:
        return make(template)
    items = list(template.items)
    items[place[0]] = with_number(items[place[0]], place[1:], make)
    return Items(template.kind, template.keys, tuple(items))
