"""From a record to a program: its calls, as a function without branches, are compiled."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.program.backends import StepBackend
from dynamo_backends.aot.step.program.optimizers import NewStateError
from dynamo_backends.aot.step.program.recording import Definition
from dynamo_backends.aot.step.program.straight_line import StraightLine
from dynamo_backends.aot.step.program.variant import Variant
from dynamo_backends.aot.step.record.interpreter import group_numbers_as
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.trie import Entry
from dynamo_backends.aot.step.state.arguments import flatten_batch, shared_memory
from dynamo_backends.aot.step.state.hyperparameters import OptimizerSettings
from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.interface.errors import StepCaptureError, text_of


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
        try:
            with group_numbers_as(definition.optimizers, segment.numbers):
                self.variant = Variant(
                    self._line, definition, backend, inventory, batch, pure, replicated
                )
        except NewStateError:
            raise
        except StepCaptureError as error:
            raise self._located(error) from error
        self.seconds = self.variant.capture_seconds

    def _located(self, error: StepCaptureError) -> StepCaptureError:
        entry, text = self._line.entry, text_of(error)
        if entry is not None and entry.line not in text:
            text = f"{text} (recorded at {entry.line})"
        return type(error)(text)

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
        """Returns whether it may run for a call that went the way of its record."""
        given = [self.trie.values[n] for n in self._line.all_inputs]
        tensors, numbers = inventory.tensors, self._numbers(segment)
        if self._is_apart and self._line.views.are_apart(given):
            return self.variant.guards.why_not(tensors, numbers) is None
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
        if self.variant.guards.why_not(tensors, numbers) is not None:
            return False
        return self._line.views.hold(list(zip(self._line.all_inputs, given, strict=True)), tensors)

    def why_not_next(self, inventory: Inventory) -> str | None:
        """Returns why it may not run for the next call, if that goes the same way; None: it may."""
        return self.variant.guards.why_not(inventory.tensors, self._numbers(None))

    def numbers_of_optimizers(self, segment: Segment | None) -> list[Any]:
        """Returns the optimizers' numbers, as they were when each took its step."""
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
        return dict(zip(self.outputs, results, strict=True))
