"""Places where Python values live: items of containers, attributes, variables of closures."""

import enum
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from types import CellType
from typing import Any

import numpy as np
import torch


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()
"""Where there is no value."""


class _Any:
    def __repr__(self) -> str:
        return "anything"


ANY: Any = _Any()
"""An item that is followed by itself."""

CONTAINERS = (list, dict, set, deque, bytearray, np.ndarray)
"""What can be changed in place by C code."""

_SIMPLE = (
    bool, int, float, complex, str, bytes, type(None), type(...), enum.Enum, np.generic, range,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


def is_simple(value: Any) -> bool:
    """Whether a value is told from others by comparing it: a number, a flag, a string."""
    return isinstance(value, _SIMPLE)


def is_number(value: Any) -> bool:
    """Whether a value can become an input of a graph."""
    return type(value) in (int, float) and (type(value) is float or abs(value) < 2**53)


def is_same(now: Any, before: Any) -> bool:
    """Whether a value is what it was: the same object, or as simple and equal."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if type(now) is tuple:
        return len(now) == len(before) and all(map(is_same, now, before))
    if not is_simple(now):
        return False
    return bool(now == before) or (now != now and before != before)


class Attributes:
    """The attributes of an object that has no dictionary, as a mapping."""

    def __init__(self, owner: Any):
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        """Reads one."""
        try:
            return getattr(self.owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        """Writes one."""
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        """Deletes one."""
        delattr(self.owner, name)


class Variable:
    """A variable of a closure as a mapping with one item, `None`."""

    def __init__(self, cell: CellType):
        self.owner = cell

    def __getitem__(self, key: Any) -> Any:
        """Reads it."""
        try:
            return self.owner.cell_contents
        except ValueError:  # not assigned yet
            raise KeyError(key) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        """Writes it."""
        self.owner.cell_contents = value

    def __delitem__(self, key: Any) -> None:
        """Deletes it."""
        del self.owner.cell_contents


class ClassAttributes(Attributes):
    """The attributes that a class itself defines, as a mapping."""

    def __getitem__(self, name: str) -> Any:
        """Reads one."""
        return vars(self.owner)[name]


class Place:
    """Where a value lives.

    Args:
        container: What it is an item of.
        key: Which one.
        name: What a user would call it: "cfg.weight".
        line: Where it was first read or written.
    """

    __slots__ = ("container", "key", "line", "name")

    def __init__(self, container: Any, key: Any, name: str, line: str):
        self.container, self.key, self.name, self.line = container, key, name, line

    @property
    def identity(self) -> tuple[int, Any]:
        """The same for all places that are one."""
        container = self.container
        owner = container.owner if isinstance(container, Attributes | Variable) else container
        return id(owner), self.key if is_simple(self.key) else id(self.key)

    def get(self) -> Any:
        """The value of now; `MISSING` if there is none."""
        container = self.container
        if type(container) is not dict and isinstance(container, dict):
            return dict.get(container, self.key, MISSING)  # a defaultdict would make one
        try:
            return container[self.key]
        except (KeyError, IndexError, TypeError):
            return MISSING

    def set(self, value: Any) -> None:
        """Puts a value there, or takes it away (`MISSING`)."""
        if value is not MISSING:
            self.container[self.key] = value
        elif self.get() is not MISSING:
            del self.container[self.key]

    def __str__(self) -> str:
        """For people."""
        return f"{self.name} (read or written at {self.line})"


class PlaceGuard:
    """Whether places still have the values that a trace saw.

    Args:
        places: The places.
        values: What was there.
    """

    def __init__(self, places: Sequence[Place], values: Sequence[Any]):
        def by_container(pair: tuple[Place, Any]) -> int:
            return id(pair[0].container)

        pairs = sorted(zip(places, values, strict=True), key=by_container)
        self._places = [place for place, _ in pairs]
        self._values = [value for _, value in pairs]
        self._readers: list[tuple[Callable[[Any], Any], Any]] = []
        self._singles: list[tuple[Callable[[Any], Any], Any]] = []
        for _, group in groupby(pairs, by_container):
            members = list(group)
            container = members[0][0].container
            keys = [place.key for place, _ in members]
            is_plain = type(container) in (dict, list)
            if is_plain and len(keys) > 1 and not any(v is MISSING for _, v in members):
                self._readers.append((operator.itemgetter(*keys), container))
            elif is_plain and len(keys) == 1 and members[0][1] is not MISSING:
                self._singles.append((operator.itemgetter(keys[0]), container))
            else:
                self._singles += [(_get, place) for place, _ in members]
        self._order()

    def _order(self) -> None:
        """Values in the order in which `_read` finds them."""
        grouped = {id(c) for _, c in self._readers}
        first = [i for i, p in enumerate(self._places) if id(p.container) in grouped]
        others = [i for i, p in enumerate(self._places) if id(p.container) not in grouped]
        order = [*first, *others]
        self._places = [self._places[i] for i in order]
        self._values = [self._values[i] for i in order]

    def _read(self) -> list[Any]:
        found: list[Any] = []
        for getter, container in self._readers:
            found += getter(container)
        found += [getter(container) for getter, container in self._singles]
        return found

    def changed(self) -> list[Place]:
        """The places whose values are others than they were."""
        try:
            now = self._read()
        except (KeyError, IndexError, TypeError, AttributeError):
            now = [place.get() for place in self._places]
        if all(map(operator.is_, now, self._values)):
            return []
        pairs = zip(self._places, now, self._values, strict=True)
        changed = [place for place, new, before in pairs if not is_same(new, before)]
        if not changed:
            self._values = now  # equal, and found by identity from now on
        return changed


def _get(place: Place) -> Any:
    return place.get()


def items_of(container: Any) -> list[Any]:
    """The items of a container, for a comparison with later ones."""
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    if isinstance(container, np.ndarray):
        return [container.shape, container.dtype.str, container.tobytes()]
    if isinstance(container, set):
        return sorted(container, key=id)
    return list(container)


class ContentsGuard:
    """Whether a container has the items that a trace saw.

    Args:
        container: A list, dict, set, deque, bytearray or array.
        items: Its items then, by `items_of`.
        place: What to call it.
    """

    def __init__(self, container: Any, items: list[Any], place: Place):
        self.place = place
        self._container = container
        self._items = items

    def holds(self) -> bool:
        """Whether it has."""
        now = items_of(self._container)
        if len(now) != len(self._items):
            return False
        if all(map(operator.is_, now, self._items)):
            return True
        if isinstance(self._container, np.ndarray):
            return now == self._items
        pairs = zip(now, self._items, strict=True)
        return all(before is ANY or is_same(new, before) for new, before in pairs)


def copy_of(container: Any) -> Any:
    """A shallow copy, to be put back with `restore`."""
    return dict(container) if isinstance(container, dict) else container.copy()


def restore(container: Any, copy: Any) -> None:
    """Gives a container the contents of a copy of it."""
    if isinstance(container, np.ndarray):
        container[...] = copy
    elif isinstance(container, dict):
        # A class of its own may forbid its methods.
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, value in dict.items(copy):
            kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        container.clear()
        container.update(copy)
    elif isinstance(container, deque):
        container.clear()
        container.extend(copy)
    else:
        container[:] = copy


def extend(container: Any, items: Iterable[Any]) -> None:
    """Adds items at the end of a list or deque."""
    container.extend(items)
