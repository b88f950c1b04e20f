"""What a traced step did in Python, to be done again at each call with the values of that call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from dynamo_backends.aot.step.python_state import places as kinds
from dynamo_backends.aot.step.python_state.ledger import Changed, Ledger, Written
from dynamo_backends.aot.step.python_state.places import MISSING, Place

Leaf = Any
Evaluate = Callable[[Leaf], Any]
ToLeaf = Callable[[Any, str], Leaf]


@dataclass(frozen=True)
class Value:
    """A Python value that is put together anew at each call.

    Attributes:
        leaves: What `Evaluate` makes values of.
        spec: How they are put together.
    """

    leaves: tuple[Leaf, ...]
    spec: Any

    def evaluate(self, evaluate: Evaluate) -> Any:
        """The value of one call."""
        return pytree.tree_unflatten([evaluate(leaf) for leaf in self.leaves], self.spec)


@dataclass(frozen=True)
class Assignment:
    """A place gets a value."""

    place: Place
    value: Value

    def replay(self, evaluate: Evaluate) -> None:
        """Does it."""
        self.place.set(self.value.evaluate(evaluate))


@dataclass(frozen=True)
class Deletion:
    """A place loses its value."""

    place: Place

    def replay(self, evaluate: Evaluate) -> None:
        """Does it."""
        self.place.set(MISSING)


@dataclass(frozen=True)
class Contents:
    """A container gets other contents, or more of them."""

    container: Any
    value: Value
    only_appends: bool

    def replay(self, evaluate: Evaluate) -> None:
        """Does it."""
        value = self.value.evaluate(evaluate)
        if self.only_appends:
            self.container.extend(value)
        else:
            kinds.restore(self.container, value)


@dataclass(frozen=True)
class Call:
    """A function is called: `print`, a scheduler's `step`."""

    function: Callable[..., Any]
    arguments: Value

    def replay(self, evaluate: Evaluate) -> None:
        """Does it."""
        args, kwargs = self.arguments.evaluate(evaluate)
        self.function(*args, **kwargs)


Effect = Assignment | Deletion | Contents | Call


def value_of(value: Any, ledger: Ledger, to_leaf: ToLeaf, name: str) -> Value:
    """Takes a Python value of a trace apart into leaves.

    Args:
        value: The value; objects from outside stay whole.
        ledger: Knows these.
        to_leaf: Makes a leaf, or raises `StepCaptureError`.
        name: What the value is, for errors.
    """
    leaves, spec = pytree.tree_flatten(value, is_leaf=ledger.is_old)
    return Value(tuple(to_leaf(leaf, name) for leaf in leaves), spec)


def effects_of(ledger: Ledger, to_leaf: ToLeaf) -> list[Effect]:
    """The effects of what a ledger has written down, as the traced code left it."""
    effects: list[Effect] = []
    for written in ledger.written.values():
        effects += _assignments(written, ledger, to_leaf)
    for changed in ledger.changed.values():
        effects += _contents(changed, ledger, to_leaf)
    return effects


def _assignments(written: Written, ledger: Ledger, to_leaf: ToLeaf) -> Sequence[Effect]:
    place, now = written.place, written.place.get()
    if kinds.is_same(now, written.before):
        return ()
    if now is MISSING:
        return (Deletion(place),)
    return (Assignment(place, value_of(now, ledger, to_leaf, str(place))),)


def _contents(changed: Changed, ledger: Ledger, to_leaf: ToLeaf) -> Sequence[Effect]:
    container, before = changed.container, changed.before
    name = str(changed.place)
    if changed.only_appends:
        is_limited = getattr(container, "maxlen", None) is not None
        first = -min(changed.appended, len(container)) if is_limited else len(before)
        added = list(container)[first:] if first or not is_limited else []
        return (Contents(container, value_of(added, ledger, to_leaf, name), True),)
    now = kinds.copy_of(container)
    if all(map(kinds.is_same, kinds.items_of(now), kinds.items_of(before))) and len(now) == len(
        before
    ):
        return ()
    if isinstance(container, set):
        value = Value((to_leaf(now, name),), pytree.tree_structure(0))
        return (Contents(container, value, False),)
    return (Contents(container, value_of(now, ledger, to_leaf, name), False),)
