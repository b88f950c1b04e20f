"""The one policy of what is kept of many: what was used least recently leaves."""

from collections import OrderedDict
from collections.abc import Hashable, ValuesView
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LRU(Generic[Key, Value]):
    """Values by keys, of which so many are kept that were used last.

    Looking a value up takes no lock: between two threads it may be missed, and is made again.

    Args:
        most: So many are kept.
    """

    def __init__(self, most: int):
        self.most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        """Counts the entries."""
        return len(self._values)

    def __contains__(self, key: Key) -> bool:
        """Returns whether there is a value of a key; to ask is no use of it."""
        return key in self._values

    def values(self) -> ValuesView[Value]:
        """The values, those used least recently first; to look at them is no use of them."""
        return self._values.values()

    def get(self, key: Key) -> Value | None:
        """Returns the value of a key, which is thereby used; None: there is none."""
        try:
            self._values.move_to_end(key)
            return self._values[key]
        except KeyError:
            return None

    def put(self, key: Key, value: Value) -> None:
        """Keeps a value, which is thereby used; those leave that are too many."""
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self.most:
            self._values.popitem(last=False)

    def drop(self, key: Key) -> bool:
        """Forgets the value of a key; returns whether there was one."""
        return self._values.pop(key, None) is not None

    def clear(self) -> None:
        """Forgets all."""
        self._values.clear()
