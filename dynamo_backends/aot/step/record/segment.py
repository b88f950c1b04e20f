"""One segment of a step: the calls between two cuts, followed through a trie of records."""

import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import filter_hooked_tensors, storage_id
from dynamo_backends._torch_private.pending_tensors import materialize_pending
from dynamo_backends.aot.step.backward.hooks import NodeHooks, Tables
from dynamo_backends.aot.step.record.placeholders import (
    TensorSpec,
    is_placeholder,
    materialize_deferred,
)
from dynamo_backends.aot.step.record.templates import Ref
from dynamo_backends.aot.step.record.trie import Flags, Holders, Trie, TrieNode
from dynamo_backends.interface.errors import StepCaptureError


class Segment:
    """The tensors of the calls between two cuts, by their numbers in a trie.

    Args:
        trie: The records that begin here.
        lives: Ids of the tensors that live from step to step.
        before: The segment before it, if its calls were executed one by one.

    Attributes:
        node: The place in the trie.
        gradients: Which tensor is the gradient of which, as far as the calls say so.
        flags: Those of results that a call has changed.
        numbers: Numbers of optimizers that have taken their step, by their ids.
        parts: This process's parts of `Trie.batch`, by their numbers.
        arguments: Arguments of the step, if it is spread over a mesh.
        wrapped: What functorch refers to instead of placeholders that are ordinary tensors by now.
    """

    def __init__(self, trie: Trie, lives: Mapping[int, Any], before: "Segment | None" = None):
        self.trie = trie
        self.node: TrieNode = trie.root
        self.gradients: dict[int, int | None] = {}
        self.flags: dict[int, Flags] = {}
        self.numbers: dict[int, list[Any]] = {}
        self.parts: dict[int, Tensor] = {}
        self.arguments: Any = ()
        self.wrapped: list[Any] = []
        self._lives = lives
        self._index: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self._inputs: list[int] = []
        self._storages: dict[int, int] = {}
        self._freed = {} if before is None else before._results_with_history()

    # Replaying

    def bind(self, number: int, tensor: Any) -> bool:
        """Takes a tensor for an input of the record, if it may be it."""
        if not isinstance(tensor, Tensor) or is_placeholder(tensor):
            return False
        key = id(tensor)
        if key in self._index or key in self._lives:
            return False
        trie = self.trie
        if trie.kinds[number] == "slot" or not trie.matches(number, tensor):
            return False
        trie.values[number] = tensor
        self._index[key] = number
        self._inputs.append(number)
        return True

    def unbind(self, count: int) -> bool:
        """Forgets all inputs but the first ones; returns False."""
        for number in self._inputs[count:]:
            self._index.pop(id(self.trie.values[number]), None)
            self.trie.values[number] = None
        del self._inputs[count:]
        return False

    @property
    def inputs(self) -> int:
        """Returns how many inputs were bound."""
        return len(self._inputs)

    @property
    def bound(self) -> dict[int, Tensor]:
        """The inputs of a call that is replayed, by their numbers."""
        return {n: self.trie.values[n] for n in self._inputs}

    def matches(self, number: int, tensor: Tensor) -> bool:
        """Returns whether a tensor is, or could be bound as, one of the record."""
        trie = self.trie
        if number in self.node.known or trie.kinds[number] == "slot":
            return trie.values[number] is tensor
        is_new = not is_placeholder(tensor) and id(tensor) not in self._index
        return is_new and id(tensor) not in self._lives and trie.specs[number].matches(tensor)

    # Both

    def number_of(self, tensor: Tensor) -> int | None:
        """Returns the number of a tensor; None if no call has had it."""
        if is_placeholder(tensor):
            value: int = tensor.step_value  # type: ignore[attr-defined]
            if value < 0:
                raise StepCaptureError(
                    "a tensor of a training step was not computed, because the step that would "
                    "have computed it failed. Call the step again."
                )
            return value
        number: int | None = self._index.get(id(tensor))
        if number is None:
            return self.trie.slots.get(id(tensor))
        alive = self._alive.get(number)
        if alive is not None and alive() is not tensor:
            del self._index[id(tensor)]  # another object had the id
            return self.trie.slots.get(id(tensor))
        return number

    def lives_on(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lives from step to step."""
        return id(tensor) in self._lives

    def has_had(self, number: int, tensor: Tensor) -> bool:
        """Returns whether a tensor was the input of a number."""
        return self._index.get(id(tensor)) == number

    def is_untouched(self, tensor: Tensor) -> bool:
        """Returns whether Python may look at a tensor: no call of this segment has had it."""
        if is_placeholder(tensor):
            return False
        number = self.number_of(tensor)
        return number is None or number not in self.node.known

    def writes_to_memory_of(self, values: Any) -> bool:
        """Returns whether a call of this segment may change tensors that no call has had: views."""
        if not any(entry.mutates for entry in self.node.path()):
            return False
        trie = self.trie
        known = (trie.values[n] for n in self.node.known if trie.kinds[n] != "result")
        storages = {storage_id(t) for t in known if t is not None} - {None}
        return any(isinstance(t, Tensor) and storage_id(t) in storages for t in values)

    def memory_of(self, tensor: Tensor) -> Any:
        """Returns a key that tensors share if they share memory."""
        if not is_placeholder(tensor):
            return storage_id(tensor)
        number = self.number_of(tensor)
        assert number is not None
        root = self.trie.aliases.get(number, number)
        is_result = self.trie.kinds[root] == "result"
        return ("result", root) if is_result else storage_id(self.trie.values[root])

    def is_result(self, tensor: Tensor) -> bool:
        """Returns whether a call of this segment has made a tensor."""
        number = self.number_of(tensor)
        return number is not None and self.trie.kinds[number] == "result"

    def hooked_leaves(self, replaying: bool) -> dict[Tensor, Tables]:
        """Returns the leaves with hooks that calls have had, always in the same order.

        Returns:
            For each leaf the hooks on the node that accumulates its gradient.
        """
        node, kinds = self.node, self.trie.kinds
        numbers = node.may_have_hooks(kinds)
        find = self.trie.values.__getitem__ if replaying else self.real
        tensors = list(map(find, numbers))
        if node.hooks is None:
            places: dict[bool, list[int]] = {True: [], False: []}
            for i, number in enumerate(numbers):
                places[kinds[number] == "slot"].append(i)
            node.hooks = NodeHooks(places[True], places[False])
        of_nodes = node.hooks.find(tensors)
        hooked = set(map(id, filter_hooked_tensors(tensors))) | of_nodes.keys()
        if not hooked:
            return {}
        found = [t for t in tensors if id(t) in hooked and t.requires_grad and t.is_leaf]
        return {t: of_nodes.get(id(t), ({}, {})) for t in found}

    def held(self) -> list[int]:
        """Returns the results that user code refers to, and the gradients of such results."""
        node, kinds = self.node, self.trie.kinds
        if node.holders is None:
            node.holders = Holders(self.trie, node)
        held = node.holders.find()
        for target, gradient in self.gradients.items():
            if gradient is None or not kinds[target] == kinds[gradient] == "result":
                continue
            if target in held and gradient not in held:
                held.append(gradient)
        return held

    def has_history(self, replaying: bool) -> bool:
        """Returns whether a backward pass may still go through what was computed here."""
        if replaying:
            values = self.trie.values
            history = (n for n in self.node.history if values[n] is not None)
            return any(map(self.trie.is_held, history))
        alive = self._alive
        return any(n in alive and alive[n]() is not None for n in self.node.history)

    def abandon(self) -> None:
        """Gives up what was not computed: the step has failed."""
        for number in self.held():
            self.trie.values[number].step_value = -1
            self.trie.renew((number,))

    # Recording

    def _results_with_history(self) -> dict[int, "weakref.ref[Tensor]"]:
        """At a cut: the results with a history, which no backward pass goes through any more."""
        kinds = self.trie.kinds
        results = {n: self.real(n) for n in self._alive if kinds[n] == "result"}
        found = {id(t): self._alive[n] for n, t in results.items() if t is not None and t.grad_fn}
        return {**self._freed, **found}

    def is_freed(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has a history from before a cut; a replay has it without."""
        result = self._freed.get(id(tensor))
        return result is not None and result() is tensor

    def ref(self, tensor: Tensor) -> Ref:
        """Returns the number of a tensor that a call takes; a new one is an input."""
        number = self.number_of(tensor)
        if number is None and id(tensor) in self._lives:
            number = self.trie.slot(tensor)
        if number is None:
            spec = TensorSpec.of(tensor.detach() if self.is_freed(tensor) else tensor)
            number = self._note(self.trie.add(spec, "input"), tensor)
        elif self.trie.kinds[number] == "slot":
            self._note_memory(number, tensor)
        return Ref(number)

    def result(self, tensor: Tensor) -> Ref:
        """Returns the number of a tensor that a call returns."""
        number = self.number_of(tensor)
        if number is None and id(tensor) in self._lives:
            number = self.trie.slot(tensor)
        if number is None:
            number = self._note(self.trie.add(TensorSpec.of(tensor), "result"), tensor)
        return Ref(number)

    def _note(self, number: int, tensor: Tensor) -> int:
        self._index[id(tensor)] = number
        self._alive[number] = weakref.ref(tensor)
        self._note_memory(number, tensor)
        return number

    def _note_memory(self, number: int, tensor: Tensor) -> None:
        """Notes whose memory a tensor is part of."""
        storage = storage_id(tensor)
        if storage is None:
            return
        first = self._storages.setdefault(storage, number)
        base = self.real(first)
        if base is None or storage_id(base) != storage:
            self._storages[storage] = number  # that of a tensor that is gone
        elif first != number:
            self.trie.aliases[number] = self.trie.aliases.get(first, first)

    def rename(self, tensor: Tensor, result: Tensor) -> None:
        """Takes a tensor for another result, which it has become."""
        number, before, trie = self.number_of(result), self.number_of(tensor), self.trie
        assert number is not None
        assert before is not None
        if not is_placeholder(tensor):
            self._index[id(tensor)] = number
            self._alive[number] = weakref.ref(tensor)
            return
        trie.renew((before,))
        tensor.step_value = number  # type: ignore[attr-defined]
        trie.values[number] = tensor
        trie.attributes[number] = vars(tensor)

    def real(self, number: int) -> Tensor | None:
        """Returns the tensor of a number while calls are recorded; None if it is gone."""
        if self.trie.kinds[number] == "slot":
            return self.trie.values[number]
        alive = self._alive.get(number)
        return None if alive is None else alive()

    def alive(self) -> list[int]:
        """The recorded results that somebody refers to, besides gradients where they belong."""
        trie = self.trie
        owners = (self.real(n) for n in self.node.known if trie.kinds[n] != "result")
        gradients = {id(t.grad) for t in owners if t is not None and t.is_leaf}
        found = ((n, self.real(n)) for n in self._alive if trie.kinds[n] == "result")
        return [n for n, t in found if t is not None and id(t) not in gradients]

    def note_inputs(self) -> bool:
        """Takes the inputs of recorded calls for those of a replay; False if one is gone."""
        trie = self.trie
        numbers = [n for n in self.node.known if trie.kinds[n] == "input"]
        for number in numbers:
            trie.values[number] = self.real(number)
        return all(trie.values[n] is not None for n in numbers)

    def unwrap(self) -> None:
        """Makes ordinary tensors of what functorch has returned to user code."""
        wrapped, self.wrapped = self.wrapped, []
        while wrapped:
            wrapper = wrapped.pop()
            if wrapper._use_count() > 1:
                self.wrapped.append(wrapper)
            elif sys.getrefcount(wrapper) > _UNSHARED_LOCAL:
                contents = vars(wrapper).pop("contents")
                number = self.number_of(contents)
                materialize_pending(wrapper, _alias(contents))
                if number is not None:
                    self._note(number, wrapper)
            del wrapper

    def become_real(self, tensors: dict[int, Tensor], held: list[int]) -> None:
        """Makes ordinary tensors of placeholders, to go on with them.

        Args:
            tensors: What was computed, by numbers; is emptied.
            held: Those that user code refers to.
        """
        trie = self.trie
        for number in self._inputs:
            self._note(number, trie.values[number])
        for number in held:
            placeholder = trie.values[number]
            real = _unshared(tensors.pop(number))
            if materialize_deferred(placeholder, real):
                self.wrapped.append(real)
            self._note(number, placeholder)
            del placeholder, real
        for target, made in self.gradients.items():
            if target in held and made in held:
                trie.values[target].grad = trie.values[made]
        trie.renew(n for n in self.node.known if trie.kinds[n] == "result")
        tensors.clear()
        for target, made in self.gradients.items():
            owner = self.real(target)
            gradient = None if owner is None or made is None else owner.grad
            if gradient is not None and made is not None and self.real(made) is None:
                self._note(made, gradient)


def _unshared(tensor: Tensor) -> Tensor:
    """Returns a tensor, or an alias of it if an open backward pass refers to it."""
    return tensor if sys.getrefcount(tensor) <= _UNSHARED else _alias(tensor)


def _alias(tensor: Tensor) -> Tensor:
    with torch.enable_grad():  # also where a hook has left the record, within a backward pass
        return tensor.view_as(tensor) if tensor.grad_fn is not None else tensor.detach()


def _references(value: Any) -> int:
    return sys.getrefcount(value)


_UNSHARED = _references([].copy())
"""What `sys.getrefcount` is for an argument that nobody else refers to."""


def _references_of_local() -> int:
    value: list[Any] = []
    return sys.getrefcount(value)


_UNSHARED_LOCAL = _references_of_local()
"""Likewise for a local variable."""
