"""The calls of a record as a function without branches, which a trace can follow."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import (
    graph_being_traced,
    mark_backward_pass,
    storage_id,
)
from dynamo_backends.aot.step.backward.engine import DONE
from dynamo_backends.aot.step.backward.tape import (
    Tape,
    begin_backward,
    change_tape,
    resume_backward,
)
from dynamo_backends.aot.step.record.interpreter import TakeStep, execute
from dynamo_backends.aot.step.record.templates import Number, leaves
from dynamo_backends.aot.step.record.trie import Entry, Trie


class StraightLine:
    """The calls of a record as a function; it reads nothing in Python but numbers of the record.

    It is what `capture.record` traces.

    Args:
        trie: Trie of the record.
        path: The calls.
        outputs: The numbers of the tensors that are returned.
        tensors: What lives on.
        copies: Copies are returned: what lives on keeps its contents, and the calls change them.

    Attributes:
        inputs: The numbers of its arguments; None: no call takes it.
        numbers: The numbers in Python that are inputs, besides those of optimizers.
    """

    def __init__(
        self,
        trie: Trie,
        path: Sequence[Entry],
        outputs: Sequence[int],
        tensors: Sequence[Tensor],
        copies: bool,
    ):
        self._trie = trie
        self._path = path
        self._outputs = outputs
        self._copies = copies
        mentioned = {n for entry in path for n in entry.mentioned()}
        self.slots = [n for n in sorted(mentioned) if trie.kinds[n] == "slot"]
        self.all_inputs = [
            n
            for n in sorted(mentioned.union(outputs))
            if trie.kinds[n] == "input" or n in trie.batch
        ]
        self.views = InputViews([(n, trie.values[n]) for n in self.all_inputs], tensors)
        self.inputs: list[int | None] = [n for n in self.all_inputs if n not in self.views.bases]
        self.places = sorted({index for entry in path for index in numbers_in(entry)})
        self.numbers = [trie.numbers[i] for i in self.places]
        self.entry: Entry | None = None

    def __call__(
        self,
        inputs: Sequence[Any],
        stand_ins: Sequence[Tensor],
        take_step: TakeStep,
        is_number: Callable[[Any], bool],
    ) -> list[Any]:
        """Runs the calls, and returns their results."""
        tensors: dict[Any, Any] = dict(zip(self.inputs, inputs, strict=True))
        numbers = dict(zip(self.places, stand_ins, strict=True))
        tensors.update((n, self._trie.values[n]) for n in self.slots)
        tensors.update(self.views.create())
        before = change_tape(Tape(is_number))
        passes = _Passes()

        def note(entry: Entry) -> None:
            self.entry = entry
            passes.note(entry)

        try:
            execute(self._path, tensors, numbers.__getitem__, self._outputs, note, take_step)
            passes.note(None)
        finally:
            change_tape(before).clear()
        self.entry = None
        results = [tensors[n] for n in self._outputs]
        return [result.clone() for result in results] if self._copies else results


class _Passes:
    """Marks what backward passes that are divided leave in the graph that is traced."""

    def __init__(self) -> None:
        self._last: Entry | None = None
        self._before: fx.Node | None = None
        self._numbers = itertools.count(-1, -1)  # those of passes that are not divided are positive

    def note(self, entry: Entry | None) -> None:
        """A call begins; None: all have been traced."""
        last, self._last = self._last, entry
        if last is not None and _is_part(last) and last.result.items[0] == DONE:
            later = reversed(graph_being_traced().nodes)
            nodes = itertools.takewhile(lambda node: node is not self._before, later)
            mark_backward_pass(list(nodes), next(self._numbers))
        if entry is not None and entry.function is begin_backward and _is_part(entry):
            self._before = next(iter(reversed(graph_being_traced().nodes)))


def _is_part(entry: Entry) -> bool:
    """Returns whether a call is a part of a backward pass that is within no other."""
    return entry.function in (begin_backward, resume_backward) and entry.args.items[0] == 0


def numbers_in(entry: Entry) -> set[int]:
    """Returns the numbers of a call that are inputs, by their places in the trie."""
    both = (*leaves(entry.args), *leaves(entry.kwargs))
    return {leaf.index for leaf in both if type(leaf) is Number}


class InputViews:
    """Inputs of a record that are views of tensors that live on, such as a weight's `detach()`.

    A program with both as inputs would not know that they share memory. It gets the tensor that
    lives on and makes the view itself. Views with a history are left as they are.

    Attributes:
        bases: For each input that is a view the position of the tensor that lives on.
    """

    def __init__(self, inputs: Sequence[tuple[int, Tensor]], tensors: Sequence[Tensor]):
        self._tensors = tensors
        self._storages = {storage_id(t): i for i, t in reversed(list(enumerate(tensors)))}
        self._storages.pop(None, None)
        self.bases = self._find(inputs, tensors)
        self._geometry = {n: _geometry(x) for n, x in inputs if n in self.bases}

    def _find(
        self, inputs: Iterable[tuple[int, Tensor]], tensors: Sequence[Tensor]
    ) -> dict[int, int]:
        found = {}
        for number, view in inputs:
            storage = storage_id(view)
            i = self._storages.get(storage)
            if i is not None and not view.requires_grad and storage_id(tensors[i]) == storage:
                found[number] = i
        return found

    def are_apart(self, inputs: Sequence[Tensor]) -> bool:
        """Returns whether no input shares memory with another one, or with what lives on."""
        storages = list(map(storage_id, inputs))
        is_alone = len(set(storages)) == len(storages) and None not in storages
        return is_alone and self._storages.keys().isdisjoint(storages)

    def hold(self, inputs: Sequence[tuple[int, Tensor]], tensors: Sequence[Tensor]) -> bool:
        """Returns whether the inputs of a call are views of the same tensors in the same way."""
        return self._find(inputs, tensors) == self.bases and all(
            _geometry(x) == self._geometry[n] for n, x in inputs if n in self.bases
        )

    def create(self) -> dict[int, Tensor]:
        """Creates the views, inside of a trace; returns them by their numbers."""
        views = {}
        for number, i in self.bases.items():
            views[number] = base = self._tensors[i].detach()
            if _geometry(base) != self._geometry[number]:  # such a view can be read, not written to
                views[number] = base.as_strided(*self._geometry[number])
        return views


def _geometry(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())
