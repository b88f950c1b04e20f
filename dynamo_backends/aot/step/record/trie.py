"""The trie of records: what the torch calls of a step were, one branch for each way it went."""

import operator
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamo_backends._torch_private import TensorProperties, saved_tensors_hooks
from dynamo_backends._torch_private.pending_tensors import (
    function_mode_depth,
    is_any_autocast_enabled,
)
from dynamo_backends.aot.step.backward.hooks import NodeHooks
from dynamo_backends.aot.step.record.placeholders import (
    TensorSpec,
    has_attributes,
    make_placeholder_tensor,
)
from dynamo_backends.aot.step.record.templates import (
    Items,
    Number,
    Place,
    fill,
    leaves,
    refs,
    with_number,
)

MAX_WAYS = 32
"""How many calls may follow a place of a trie; the first one is dropped."""

MAX_TENSORS = 200_000
"""How many tensors a trie has at most."""

VARYING = object()
"""A value that depends on what a step gets."""

State = tuple[Any, ...]

Flags = tuple[bool, bool]
"""`requires_grad` and `is_leaf`."""


def torch_state() -> State:
    """Returns the settings of torch that a call depends on besides its arguments."""
    if is_any_autocast_enabled():
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)
    else:
        autocast = ()
    return torch.is_grad_enabled(), saved_tensors_hooks(), autocast


def process_state() -> State:
    """Further such settings, which hardly ever change within a step."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device() if function_mode_depth() else None,  # a mode sets it
    )


@dataclass(eq=False)
class Entry:
    """One recorded call and those that followed it.

    Attributes:
        kind: "call"; "read" (Python gets a value); "backward"; "optimizer" (its `step`);
            "zero_grad"; "set_grad" and "get_grad" (of a gradient that is there before).
        function: What was called; for an optimizer's method the kind, the optimizer and those of
            its settings that are not inputs.
        args: Template of the arguments.
        kwargs: Template of the keyword arguments.
        result: Template of the result.
        state: The settings of torch.
        line: The user's.
        made: The numbers of the tensors that it makes.
        gradients: After a backward pass: tensors and their gradients, by their numbers.
        absent: Before it: tensors without a gradient, as far as the record does not say so.
        present: Likewise those with one.
        flags: Those of results that it changes.
        mutates: Whether it changes something besides making tensors.
        draws: Whether it draws random numbers.
        value: What Python reads, if it is the same in all calls that go this way.
    """

    kind: str
    function: Any
    args: Items
    kwargs: Items
    result: Any
    state: State
    line: str
    made: tuple[int, ...] = ()
    gradients: dict[int, int | None] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    flags: tuple[tuple[int, "Flags"], ...] = ()
    mutates: bool = False
    draws: bool = False
    value: Any = VARYING

    def mentioned(self) -> set[int]:
        """Returns the numbers of all tensors that it takes or makes."""
        gradients = (n for n in self.gradients.values() if n is not None)
        return {*refs(self.args), *refs(self.kwargs), *self.made, *gradients, *self.gradients}


@dataclass(eq=False, slots=True)
class TrieNode:
    """Represents a place in the trie: the call that leads there, and its successors.

    Attributes:
        entry: The call; None at the root.
        parent: The place before; None at the root.
        known: The tensors met on the way.
        history: Those of them through which a backward pass may still go.
        children: The calls that followed.
        programs: Programs on the path to here.
        then: After a cut: where the step goes on.
        stops: Whether a checkpoint's recomputation ends with the call.
        comparison: With the call (see `comparisons`).
        following: That of the only call that may follow, if it is a plain one.
        holders: Which results somebody refers to here.
        hooks: On nodes, which a backward pass from here calls.
    """

    entry: Entry | None = None
    parent: "TrieNode | None" = None
    known: frozenset[int] = frozenset()
    history: frozenset[int] = frozenset()
    children: list["TrieNode"] = field(default_factory=list)
    programs: list[Any] = field(default_factory=list)
    then: "Trie | None" = None
    stops: bool = False
    comparison: Any = None
    following: Any = None
    holders: "Holders | None" = None
    hooks: NodeHooks | None = None
    _path: list[Entry] | None = None
    _may_have_hooks: tuple[int, ...] | None = None

    def path(self) -> list[Entry]:
        """Returns the calls from the root to here."""
        if self._path is None:
            self._path = self._find_path()
        return self._path

    def _find_path(self) -> list[Entry]:
        entries = []
        node: TrieNode | None = self
        while node is not None and node.entry is not None:
            entries.append(node.entry)
            node = node.parent
        return entries[::-1]

    def may_have_hooks(self, kinds: list[str]) -> tuple[int, ...]:
        """Returns the numbers of the tensors met on the way that may have hooks, in order."""
        if self._may_have_hooks is None:
            numbers = sorted(n for n in self.known if kinds[n] in ("slot", "input"))
            self._may_have_hooks = tuple(numbers)
        return self._may_have_hooks

    def subtree(self) -> Iterator["TrieNode"]:
        """Yields this place and all that follow it."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield node
            nodes += reversed(node.children)


class Trie:
    """The prefix tree of recorded torch calls from one point of a step on.

    Attributes:
        root: Before the first call.
        specs: The metadata of each tensor.
        values: The tensors of a call that is replayed: slots, inputs and placeholders.
        kinds: "slot", "input" or "result", for each.
        aliases: For each the tensor whose memory it was part of when it was made.
        numbers: The numbers of a call that are inputs.
        line: The user's, of the cut behind which the trie begins; empty at the start of a step.
        read_at: Where Python has read a tensor that no call has had; empty: nowhere.
        made_at: Where it has made a tensor of its own data, which may be others at each call.
        batch: The numbers of the arguments, where placeholders stand for them, too: on a mesh of
            several processes, each of which has a part of them.
    """

    def __init__(self, line: str = "") -> None:
        self.line = line
        self.read_at = self.made_at = ""
        self.batch: tuple[int, ...] = ()
        self.root = TrieNode()
        self.specs: list[TensorSpec] = []
        self.values: list[Any] = []
        self.kinds: list[str] = []
        self.attributes: list[Sized] = []
        """For each placeholder its `__dict__`."""
        self.aliases: dict[int, int] = {}
        self.numbers: list[Any] = []
        self.inputs: list[int] = []
        """The numbers of inputs, and of gradients that are there before."""
        self.slots: dict[int, int] = {}
        """The numbers of tensors that live on, by their ids."""
        self._properties: dict[int, TensorProperties] = {}

    def add(self, spec: TensorSpec, kind: str, value: Any = None) -> int:
        """Gives a tensor the next number."""
        self.specs.append(spec)
        self.kinds.append(kind)
        self.values.append(value)
        self.attributes.append(())
        if kind == "input":
            self.inputs.append(len(self.specs) - 1)
        return len(self.specs) - 1

    def add_batch(self, tensors: Iterable[Tensor]) -> None:
        """Lets the trie begin with placeholders for tensors."""
        self.batch = tuple(self.add(TensorSpec.of(t), "result") for t in tensors)
        self.root.known = frozenset(self.batch)

    def slot(self, tensor: Tensor) -> int:
        """Returns the number of a tensor that lives on."""
        number = self.slots.get(id(tensor))
        if number is None:
            number = self.slots[id(tensor)] = self.add(TensorSpec.of(tensor), "slot", tensor)
        return number

    def rebind(self, old: Tensor, new: Tensor) -> None:
        """From now on another tensor lives in the place of one that lived on."""
        number = self.slots.get(id(old))
        if number is not None and self.values[number] is old and self.specs[number].matches(new):
            del self.slots[id(old)]
            self.slots[id(new)] = number
            self.values[number] = new

    def value(self, number: int) -> Any:
        """Returns a tensor of the call that is replayed; results are placeholders."""
        value = self.values[number]
        if value is None and self.kinds[number] == "result":
            value = self.values[number] = make_placeholder_tensor(self.specs[number], number)
            self.attributes[number] = vars(value)
        return value

    def matches(self, number: int, tensor: Tensor) -> bool:
        """Returns whether a tensor has the metadata of one of the record."""
        properties = self._properties.get(number)
        if properties is None:
            if not self.specs[number].matches(tensor):
                return False
            properties = self._properties[number] = TensorProperties((tensor,))
        spec = self.specs[number]
        return properties.are_unchanged((tensor,)) and tensor.is_leaf is spec.is_leaf

    def note_move(self, number: int) -> None:
        """An input lives on a device from now on."""
        self.specs[number] = TensorSpec.of(self.values[number])
        self._properties.pop(number, None)

    def is_held(self, number: int) -> bool:
        """Returns whether anybody but the trie refers to a placeholder."""
        values = self.values
        return sys.getrefcount(values[number]) > _UNHELD

    def renew(self, numbers: Any) -> None:
        """Makes placeholders anew that user code may still hold."""
        for number in numbers:
            self.values[number] = None
            self.attributes[number] = ()

    def append(self, parent: TrieNode, entry: Entry, history: frozenset[int]) -> TrieNode:
        """Adds a call behind a place."""
        node = TrieNode(entry, parent, parent.known.union(entry.mentioned()), history)
        if len(parent.children) == MAX_WAYS:
            parent.children.pop(0)
        parent.children.append(node)
        parent.following = None
        return node

    @property
    def is_full(self) -> bool:
        """Returns whether the trie has to be rebuilt: dropped paths leave numbers behind."""
        return len(self.specs) > MAX_TENSORS

    def promote(self, node: TrieNode, places: list[Place]) -> None:
        """Makes inputs of constants in a call: they have been other ones.

        Args:
            node: The call.
            places: The constants, in its arguments and keyword arguments.
        """
        entry = node.entry
        assert entry is not None
        both = Items(tuple, (), (entry.args, entry.kwargs))
        for place in places:
            both = with_number(both, place, self._new_number)
        entry.args, entry.kwargs = both.items
        node.comparison = node.parent.following = None  # type: ignore[union-attr]
        for below in node.subtree():
            below.programs.clear()
            if below.entry is not None:
                below.entry.value = VARYING

    def _new_number(self, value: Any) -> Number:
        self.numbers.append(value.item() if isinstance(value, np.generic) else value)
        return Number(len(self.numbers) - 1, type(value), value)

    def is_constant(self, node: TrieNode, numbers: Sequence[int]) -> bool:
        """Returns whether results follow from nothing but the calls on the way to a place."""
        aliases = self.aliases
        needed = {aliases.get(n, n) for n in numbers}
        for entry in reversed(node.path()):
            given = {aliases.get(n, n) for n in (*refs(entry.args), *refs(entry.kwargs))}
            made = {aliases.get(n, n) for n in entry.made}
            if needed.isdisjoint(made.union(given) if entry.mutates else made):
                continue
            templates = (*leaves(entry.args), *leaves(entry.kwargs))
            if entry.draws or entry.kind != "call" or any(type(x) is Number for x in templates):
                return False
            needed |= given
        return all(self.kinds[n] == "result" and n not in self.batch for n in needed)

    def result(self, node: TrieNode) -> Any:
        """Returns what a replayed call returns."""
        assert node.entry is not None
        return fill(node.entry.result, self.value, self.numbers.__getitem__)


def _count() -> int:
    """Returns what `sys.getrefcount(values[number])` is if the list alone refers to an object."""
    values = [object()]
    number = 0
    return sys.getrefcount(values[number])


_UNHELD = _count()


class Holders:
    """The placeholders on a path to which user code still refers."""

    def __init__(self, trie: Trie, node: TrieNode):
        self._trie = trie
        self._numbers = [n for n in node.known if trie.kinds[n] == "result"]
        several = (*self._numbers, *self._numbers[:1])  # of one number it gets no tuple
        self._get: Any = operator.itemgetter(*several) if several else lambda values: ()
        self._seen: list[Any] = []
        self._held: list[int] = []

    def find(self) -> list[int]:
        """Returns the numbers of the placeholders that user code refers to."""
        trie = self._trie
        values = [v for v in self._get(trie.values) if v is not None]
        attributes = self._get(trie.attributes)  # empty where there is no placeholder
        seen = [
            *map(len, attributes), *map(sys.getrefcount, values),
            *map(weakref.getweakrefcount, values),
        ]  # fmt: skip
        del values
        if seen != self._seen:
            self._held = [n for n in self._numbers if self._is_held(n)]
            self._seen = seen
        return list(self._held)

    def _is_held(self, number: int) -> bool:
        value = self._trie.values[number]
        if value is None:
            return False
        if has_attributes(value) or weakref.getweakrefcount(value):
            return True  # user code knows it without holding it, or has left something on it
        del value
        return self._trie.is_held(number)
