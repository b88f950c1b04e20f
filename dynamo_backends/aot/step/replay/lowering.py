"""From a record to a program: its calls, written out as a straight line, are compiled."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import (
    graph_being_traced,
    mark_backward_pass,
    storage_id,
)
from dynamo_backends.aot.step.backends import StepBackend
from dynamo_backends.aot.step.batches import flatten_batch, shared_memory
from dynamo_backends.aot.step.bindings import NewStateError
from dynamo_backends.aot.step.inventory import Inventory
from dynamo_backends.aot.step.python_state.following import Conditions
from dynamo_backends.aot.step.python_state.places import Place
from dynamo_backends.aot.step.recording import Definition
from dynamo_backends.aot.step.replay.engine import DONE
from dynamo_backends.aot.step.replay.interpreter import execute, group_numbers_as
from dynamo_backends.aot.step.replay.segment import Segment
from dynamo_backends.aot.step.replay.settings import OptimizerSettings
from dynamo_backends.aot.step.replay.tape import Tape, begin, change_tape, proceed
from dynamo_backends.aot.step.replay.templates import Number, leaves
from dynamo_backends.aot.step.replay.trie import Entry, Trie
from dynamo_backends.aot.step.variant import Variant
from dynamo_backends.interface.errors import StepCaptureError, text_of


class StraightLine:
    """The calls of a record as a function; it reads nothing in Python but numbers of the record.

    It is what `capture.record` follows instead of a user's function.

    Args:
        trie: Of the record.
        path: The calls.
        outputs: The numbers of the tensors that are returned.
        tensors: What lives on.
        copies: Copies are returned: what lives on keeps its contents, and the calls change them.

    Attributes:
        inputs: The numbers of its arguments; None: no call takes it.
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
        self.views = _Views([(n, trie.values[n]) for n in self.all_inputs], tensors)
        self.inputs: list[int | None] = [n for n in self.all_inputs if n not in self.views.bases]
        self.places = sorted({index for entry in path for index in numbers_in(entry)})
        self.numbers = [trie.numbers[i] for i in self.places]
        self._stand_ins: dict[int, Any] = {}
        self.entry: Entry | None = None

    def __call__(self, *inputs: Any) -> list[Any]:
        """Runs the calls."""
        tensors: dict[Any, Any] = dict(zip(self.inputs, inputs, strict=True))
        tensors.update((n, self._trie.values[n]) for n in self.slots)
        tensors.update(self.views.create())
        before = change_tape(Tape())
        passes = _Passes()

        def note(entry: Entry) -> None:
            self.entry = entry
            passes.note(entry)

        try:
            execute(self._path, tensors, self._stand_ins.__getitem__, self._outputs, note)
            passes.note(None)
        finally:
            change_tape(before).clear()
        self.entry = None
        results = [tensors[n] for n in self._outputs]
        return [result.clone() for result in results] if self._copies else results

    def after_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step has been traced."""

    @contextlib.contextmanager
    def set_up(self, stand_ins: Sequence[Tensor]) -> Iterator[None]:
        """Inside: tensors stand in for numbers that are inputs."""
        self._stand_ins = dict(zip(self.places, stand_ins, strict=True))
        yield

    def follow(self) -> contextlib.AbstractContextManager[Any]:
        """Inside: the calls are traced."""
        return contextlib.nullcontext()

    def effects(self, to_leaf: Any) -> list[Any]:
        """Nothing is left to be done in Python."""
        return []

    def first(self, to_leaf: Any) -> list[Any]:
        """Nor before the calls."""
        return []

    def places_of(self, tensors: Sequence[Tensor]) -> list[Place | None]:
        """Where undeclared tensors were read."""
        raise StepCaptureError(
            f"the step uses {len(tensors)} tensors that are neither its inputs nor of its models "
            "and optimizers, inside of an optimizer."
        )

    def conditions(self, tensors: Sequence[Place]) -> Conditions:
        """It depends on nothing in Python."""
        return Conditions((), (), (), (), ())


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
        if entry is not None and entry.function is begin and _is_part(entry):
            self._before = next(iter(reversed(graph_being_traced().nodes)))


def _is_part(entry: Entry) -> bool:
    """Returns whether a call is a part of a backward pass that is within no other."""
    return entry.function in (begin, proceed) and entry.args.items[0] == 0


def numbers_in(entry: Entry) -> set[int]:
    """The numbers of a call that are inputs, by their places in the trie."""
    both = (*leaves(entry.args), *leaves(entry.kwargs))
    return {leaf.index for leaf in both if type(leaf) is Number}


class _Views:
    """Inputs of a record that are views of tensors that live on, such as a weight's `detach()`.

    A program with both as inputs would not know that they share memory. It gets the tensor that
    lives on and makes the view itself. Views with a history are left as they are.

    Args:
        inputs: The inputs with their numbers.
        tensors: What lives on.

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
        """Whether the inputs of a call are views of the same tensors in the same way."""
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


class RecordProgram:
    """A compiled record.

    Args:
        definition: Of the step.
        backend: What compiles it.
        inventory: What lives on.
        segment: A call that went the way of the record.
        path: The calls.
        outputs: The numbers of the tensors that are returned.
        pure: Nothing but these is computed, and nothing is changed.
        settings: Of the optimizers, by their ids.
        inputs: The numbers of its inputs, in order, and the tensors; None for tensors that no call
            takes. By default those that calls take.

    Attributes:
        outputs: The numbers of the tensors that are returned.
        trie: Of the record.
        variant: The compiled step.

    Raises:
        StepCaptureError: It cannot be compiled.
    """

    def __init__(
        self,
        definition: Definition,
        backend: StepBackend,
        inventory: Inventory,
        segment: Segment,
        path: Sequence[Entry],
        outputs: Sequence[int],
        pure: bool,
        settings: Mapping[int, OptimizerSettings],
        inputs: tuple[Sequence[int | None], Sequence[Tensor]] | None = None,
    ):
        self._settings = settings
        self.outputs = tuple(outputs)
        self.trie = segment.trie
        self._optimizers = definition.optimizers
        self._line = StraightLine(segment.trie, path, outputs, inventory.tensors, pure)
        self._draws = any(entry.draws for entry in path)
        self._pure = pure
        if inputs is None:
            batch = self._batch(segment)
        else:
            self._line.inputs, batch = list(inputs[0]), list(inputs[1])
        self._shared = shared_memory(batch)
        self._is_apart = not self._shared and not self._line.views.bases
        replicated = self._replicated(segment, batch) if definition.parallel else frozenset()
        for i, n in enumerate(self._line.inputs):
            if n in segment.parts:
                spec_of_whole = segment.trie.specs[n]
                batch[i] = torch.empty(spec_of_whole.size, dtype=spec_of_whole.dtype)
        leaves_of_batch, spec = flatten_batch((tuple(batch), {}))
        straight = Definition(
            self._line, definition.models, definition.optimizers, parallel=definition.parallel
        )
        try:
            with group_numbers_as(definition.optimizers, segment.numbers):
                self.variant = Variant(
                    straight, backend, inventory, leaves_of_batch, spec,
                    python=self._line, pure=pure, replicated=replicated,
                )  # fmt: skip
        except NewStateError:
            raise
        except StepCaptureError as error:
            raise self._located(error) from error
        self.seconds = self.variant.capture_seconds

    def _located(self, error: Exception) -> StepCaptureError:
        entry = self._line.entry
        where = "" if entry is None else f" (recorded at {entry.line})"
        return StepCaptureError(f"{text_of(error)}{where}")

    def _batch(self, segment: Segment) -> list[Any]:
        values, parts = self.trie.values, segment.parts
        numbers: list[Any] = self._line.inputs
        if parts:
            return [parts[n] if n in parts else values[n] for n in numbers]
        return [values[n] for n in numbers]

    def _replicated(self, segment: Segment, batch: Sequence[Tensor]) -> frozenset[int]:
        """Positions of inputs that every device of a mesh has whole: what is no argument."""
        arguments = {id(x) for x in flatten_batch(segment.arguments)[0] if isinstance(x, Tensor)}
        numbers = enumerate(self._line.inputs)
        return frozenset(
            i for i, n in numbers if n not in segment.parts and id(batch[i]) not in arguments
        )

    @property
    def inputs(self) -> tuple[int | None, ...]:
        """The numbers of its inputs."""
        return tuple(self._line.inputs)

    @property
    def has_views(self) -> bool:
        """Returns whether inputs are views of tensors that live on."""
        return bool(self._line.views.bases)

    @property
    def all_inputs(self) -> list[int]:
        """The numbers of all tensors that its calls take, besides those that live on."""
        return self._line.all_inputs

    @property
    def numbers(self) -> list[int]:
        """The numbers in Python that are inputs, by their places in the trie."""
        return self._line.places

    def holds(self, segment: Segment, inventory: Inventory) -> bool:
        """Whether it may run for a call that went the way of its record."""
        given = [self.trie.values[n] for n in self._line.all_inputs]
        tensors, numbers = inventory.tensors, self._numbers(segment)
        if self._is_apart and self._line.views.are_apart(given):
            return self.variant.guards.why_not_inputs(tensors, numbers) is None
        return (
            self.accepts(tensors, numbers, given)
            and shared_memory(self._batch(segment)) == self._shared
        )

    def accepts(
        self, tensors: Sequence[Tensor], numbers: tuple[Any, ...], given: Sequence[Tensor]
    ) -> bool:
        """Returns whether it may run, if inputs share memory as they did when it was compiled.

        Args:
            tensors: What lives on.
            numbers: Of the optimizers, then those of the record.
            given: One tensor for each number of `given`.
        """
        if self.variant.guards.why_not_inputs(tensors, numbers) is not None:
            return False
        return self._line.views.hold(list(zip(self._line.all_inputs, given, strict=True)), tensors)

    def why_not_next(self, inventory: Inventory) -> str | None:
        """Why it may not run for the next call, if that goes the same way; None: it may."""
        return self.variant.guards.why_not_inputs(inventory.tensors, self._numbers(None))

    def numbers_of_optimizers(self, segment: Segment | None) -> list[Any]:
        """The optimizers' numbers, as they were when each took its step."""
        numbers: list[Any] = []
        for optimizer in self._optimizers:
            of_step = None if segment is None else segment.numbers.get(id(optimizer))
            numbers += self._settings[id(optimizer)].read()[1] if of_step is None else of_step
        return numbers

    def _numbers(self, segment: Segment | None) -> tuple[Any, ...]:
        numbers = self.numbers_of_optimizers(segment)
        numbers += [self.trie.numbers[i] for i in self._line.places]
        return tuple(numbers)

    def __call__(self, segment: Segment, inventory: Inventory) -> dict[int, Tensor]:
        """Runs it.

        Returns:
            Its outputs by their numbers.

        Raises:
            OutOfRangeError: Positions are out of range; nothing has changed.
        """
        numbers, batch = self._numbers(segment), self._batch(segment)
        state = torch.get_rng_state() if self._pure and self._draws else None
        try:
            return self.run(inventory.tensors, numbers, batch)
        finally:
            if state is not None:
                torch.set_rng_state(state)

    def run(
        self, tensors: Sequence[Tensor], numbers: tuple[Any, ...], batch: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Runs it: see `__call__`.

        Args:
            tensors: What lives on.
            numbers: Of the optimizers, then those of the record.
            batch: One tensor for each number of `inputs`.
        """
        results = self.variant(tensors, numbers, batch)
        return {
            n: self._as_tensor(n, result) for n, result in zip(self.outputs, results, strict=True)
        }

    def _as_tensor(self, number: int, result: Any) -> Tensor:
        spec = self.trie.specs[number]
        if isinstance(result, Tensor):
            return result
        return torch.tensor(result, dtype=spec.dtype, device=spec.device)
