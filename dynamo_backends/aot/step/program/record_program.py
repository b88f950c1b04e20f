"""From a record to a program: its calls, as a function without branches, are compiled."""

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dynamo_backends._torch_private import TensorProperties
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.aot.step.mesh.multiprocess import gathered_batch, ranks_of
from dynamo_backends.aot.step.program.backends import (
    StepBackend,
    refuse_shared_writes,
    refuse_sparse,
    reporting_compile_errors,
)
from dynamo_backends.aot.step.program.capture import trace_record
from dynamo_backends.aot.step.program.draws import hoist
from dynamo_backends.aot.step.program.functionalization import functionalize
from dynamo_backends.aot.step.program.mesh_layout import layout_of
from dynamo_backends.aot.step.program.optimizer_state import NewStateError
from dynamo_backends.aot.step.program.recording import Definition, Recording
from dynamo_backends.aot.step.program.straight_line import StraightLine
from dynamo_backends.aot.step.program.verified import VerifiedStep
from dynamo_backends.aot.step.record.interpreter import setting_group_numbers
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.trie import Entry
from dynamo_backends.aot.step.state.arguments import flatten_batch, shared_memory
from dynamo_backends.aot.step.state.hyperparameters import OptimizerSettings
from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.graph.canonicalize import CANONICALIZE
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.index_checks import (
    IndexCheckedGraph,
    suppress_updates_on_error,
    with_index_checks,
)
from dynamo_backends.graph.partition import count_aten_calls
from dynamo_backends.graph.pass_sequence import PassSequence
from dynamo_backends.graph.properties import NORMAL_FORM, Property
from dynamo_backends.graph.random_draws import SEPARATE_DRAWS
from dynamo_backends.interface.counters import track_executable
from dynamo_backends.interface.errors import StepCaptureError, error_text
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.publishing import publish
from dynamo_backends.interface.report import Compilation, GraphReport
from dynamo_backends.runtime.atomic_copies import retry_until_complete
from dynamo_backends.runtime.index_checks import InputBoundsCheck, OutOfRangeError
from dynamo_backends.runtime.program import graph_name, record_if_profiled

CPU = torch.device("cpu")


class SentNumbers:
    """Packs the numbers into one device tensor, which is sent again only on change."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sent: tuple[bytes, Tensor] | None = None

    def __call__(self, numbers: Sequence[float]) -> Tensor:
        """Returns the tensor, float64; not to be written to."""
        if self._device == CPU:
            return torch.tensor(numbers, dtype=torch.float64)
        given = struct.pack(f"{len(numbers)}d", *numbers)
        sent = self._sent
        if sent is None or sent[0] != given:  # as bytes: -0.0 equals 0.0
            sent = given, torch.tensor(numbers, dtype=torch.float64, device=self._device)
            self._sent = sent
        return sent[1]


class Guards:
    """The conditions under which a recording may be used again."""

    def __init__(self, inventory: Inventory, recording: Recording):
        tensors = inventory.tensors
        self._properties = TensorProperties(tensors)
        self._leaves = recording.leaves
        self._have_gradients = [tensors[i].grad is not None for i in self._leaves]
        self._with = recording.gradient_slots
        self._gradient_kinds = self._kinds_of_gradients(tensors)
        self._answers = recording.answers
        self._living = recording.living
        self._asked = {i for answer in recording.answers for i in answer.term.living()}
        self._numbers: tuple[float, ...] | None = None
        self._aliases = recording.aliases

    def why_not(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> str | None:
        """Returns why the recording cannot be used; None if it can."""
        if not self._properties.are_unchanged(tensors):
            return (
                "the shape, layout, dtype or requires_grad of a parameter, buffer or optimizer "
                "state changed"
            )
        if [tensors[i].grad is not None for i in self._leaves] != self._have_gradients:
            return "gradients were added or removed"
        if self._with and self._kinds_of_gradients(tensors) != self._gradient_kinds:
            return "the layout or dtype of a gradient changed"
        values = self._values(tensors, numbers)
        if values != self._numbers:
            if not all(answer.holds(values) for answer in self._answers):
                return (
                    "a Python scalar that the step branches on (such as weight_decay != 0) changed"
                )
            self._numbers = values
        if not self._aliases.hold(tensors):
            return "tensors share storage differently, or were moved"
        return None

    def _kinds_of_gradients(self, tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
        return [_kind(tensors[i].grad) for i in self._with]

    def _values(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> tuple[float, ...]:
        """Returns the numbers, and behind them the living tensors that the step asked about."""
        if not self._asked:
            return numbers
        first = len(numbers)
        return (
            *numbers,
            *(
                tensors[slot].item() if i in self._asked else 0
                for i, slot in enumerate(self._living, first)
            ),
        )


def _kind(tensor: Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return ()
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


_PASSES = PassSequence((CANONICALIZE, SEPARATE_DRAWS), given=NORMAL_FORM | {Property.STATIC})


TRACING = fork_safe_rlock()
"""Held while a step is captured and compiled: torch's tracing is for one thread at a time, a trace
moves torch's generator, and what stands in for numbers in Python stands there for all threads."""


class OwnerOfPrograms(Protocol):
    """The objects that all programs of a step share.

    Attributes:
        definition: Definition of the step.
        settings: Settings of its optimizers, by their ids.
        launches: How many executables its programs have launched.
    """

    definition: Definition
    settings: Mapping[int, OptimizerSettings]
    launches: int


class RecordProgram:
    """A compiled record, which may run as long as its guards hold.

    Args:
        programs: Those of the step, to which it belongs.
        backend: What compiles it.
        inventory: What lives from step to step.
        segment: A call that went the way of the record.
        path: The calls.
        outputs: The numbers of the tensors that are returned.
        pure: Nothing but these is computed, and nothing is changed.
        inputs: The numbers of its inputs, in order, and the tensors; None for tensors that no call
            takes. By default those that calls take.

    Attributes:
        outputs: The numbers of the tensors that are returned.
        trie: Trie of the record.
        calls: As a function without branches.
        recording: Recording of the calls.
        slots: What lives from step to step.
        graph: What was compiled.
        compiled: Compiled from it.
        constants: Tensors that the graph owns.
        draws: Draws its random numbers.
        guards: When it may be used.
        report: Report of the graph.
        checks: What is checked of each step.
        last_used: The highest is that of the last step.

    Raises:
        StepCaptureError: It cannot be one graph, or the backend cannot run all of it.
    """

    def __init__(
        self,
        programs: OwnerOfPrograms,
        backend: StepBackend,
        inventory: Inventory,
        segment: Segment,
        path: Sequence[Entry],
        outputs: Sequence[int],
        pure: bool,
        inputs: tuple[Sequence[int | None], Sequence[Tensor]] | None = None,
    ):
        definition = programs.definition
        self._programs = programs
        self.outputs = tuple(outputs)
        self.trie = segment.trie
        self.last_used = 0
        self.calls = StraightLine(segment.trie, path, outputs, inventory.tensors, pure)
        self._draws = any(entry.draws for entry in path)
        self._pure = pure
        if inputs is None:
            batch = self._batch(segment)
        else:
            self.calls.inputs, batch = list(inputs[0]), list(inputs[1])
        self._shared = shared_memory(batch)
        self._is_apart = not self._shared and not self.calls.views.bases
        self._ranks = ranks_of(definition.parallel)
        self._replicated = self._find_replicated(segment, batch)
        for i, n in enumerate(self.calls.inputs):
            if n in segment.parts:
                spec_of_whole = segment.trie.specs[n]
                batch[i] = torch.empty(spec_of_whole.size, dtype=spec_of_whole.dtype)
        try:
            with setting_group_numbers(definition.optimizers, segment.numbers):
                self._compile(backend, inventory, batch)
        except NewStateError:
            raise
        except StepCaptureError as error:
            raise self._located(error) from error

    def _compile(self, backend: StepBackend, inventory: Inventory, batch: Sequence[Tensor]) -> None:
        definition, parallel = self._programs.definition, self._programs.definition.parallel
        devices = (t.device for t in inventory.tensors if t.device.type != "cpu")
        where = next(devices, CPU) if backend.keeps_scalars_on_device else CPU
        recording = trace_record(self.calls, definition, inventory, batch, where)
        if self._pure:
            recording = replace(recording, gradients=(), batch_gradients=(), cleared=())
        self._sent = SentNumbers(where)
        self.recording = recording
        self.slots = tuple(inventory.slots)
        self.guards = Guards(inventory, recording)
        with reporting_compile_errors(backend.name):
            graph, self.constants = functionalize(recording, backend.decompositions, self._pure)
            _PASSES(graph)
            refuse_sparse(graph, backend.name)
            refuse_shared_writes(graph, recording.names, batch, shared_memory(batch))
            self.checks = self._find_checks(graph, self.constants, backend)
            self.graph, self.draws = hoist(self.checks.graph, backend.draws_seeds)
            start = time.perf_counter()
            if parallel is None or backend.compile_on_mesh is None:
                self.compiled: StepProgram = backend.compile(self.graph)
            else:
                spread = definition, inventory, recording, batch
                layout = layout_of(parallel, self.graph, *spread, self._replicated)
                self.compiled = backend.compile_on_mesh(self.graph, layout)
        seconds = time.perf_counter() - start
        self.report = _report(backend.name, self.graph, seconds, self.compiled.from_disk)
        track_executable(self.compiled)
        self.compiled.set_report(self.report)
        if backend.verify != "off":
            self.compiled = VerifiedStep(
                self.compiled,
                self.graph,
                self.report,
                lambda settled: setattr(self, "compiled", settled),
                always=backend.verify == "always",
                # What a rank alone takes in eager is no step of all of them.
                strict=backend.strict or self._ranks is not None,
                reduced=backend.reduced,
            )
        self._name = graph_name(self.report)
        publish(self.report)

    def _located(self, error: StepCaptureError) -> StepCaptureError:
        entry, text = self.calls.entry, error_text(error)
        if entry is not None and entry.line not in text:
            text = f"{text} (recorded at {entry.line})"
        return type(error)(text)

    def _find_checks(
        self, graph: Graph, constants: Sequence[Tensor], backend: StepBackend
    ) -> IndexCheckedGraph:
        """Returns the graph with what compiled code does not check, on CPUs."""
        values = (place.meta["val"] for place in graph.placeholders)
        on_cpu = all(v.device.type == "cpu" for v in values if isinstance(v, Tensor))
        if not on_cpu or backend.home is not None or self._programs.definition.parallel is not None:
            checks = IndexCheckedGraph(graph)
        else:
            checks = suppress_updates_on_error(with_index_checks(graph, constants))
        self._outside = None if checks.before is None else InputBoundsCheck(checks.before)
        self._flag = None if checks.flag is None else checks.flag - len(graph.updates)
        return checks

    def _batch(self, segment: Segment) -> list[Any]:
        values, parts = self.trie.values, segment.parts
        numbers: list[Any] = self.calls.inputs
        if parts:
            return [parts[n] if n in parts else values[n] for n in numbers]
        return [values[n] for n in numbers]

    def _find_replicated(self, segment: Segment, batch: Sequence[Tensor]) -> frozenset[int]:
        """Positions of inputs that every device of a mesh has whole: what is no argument."""
        if self._programs.definition.parallel is None:
            return frozenset()
        arguments = {id(x) for x in flatten_batch(segment.arguments)[0] if isinstance(x, Tensor)}
        numbers = enumerate(self.calls.inputs)
        return frozenset(
            i for i, n in numbers if n not in segment.parts and id(batch[i]) not in arguments
        )

    def holds(self, segment: Segment, inventory: Inventory) -> bool:
        """Returns whether it may run for a call that went the way of its record."""
        given = [self.trie.values[n] for n in self.calls.all_inputs]
        tensors, numbers = inventory.tensors, self._numbers(segment)
        if self._is_apart and self.calls.views.are_apart(given):
            return self.guards.why_not(tensors, numbers) is None
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
            numbers: Numbers of the optimizers, then those of the record.
            given: One tensor for each number of `calls.all_inputs`.
        """
        if self.guards.why_not(tensors, numbers) is not None:
            return False
        return self.calls.views.hold(list(zip(self.calls.all_inputs, given, strict=True)), tensors)

    def why_not_next(self, inventory: Inventory) -> str | None:
        """Returns why it may not run for the next call, if that goes the same way; None: it may."""
        return self.guards.why_not(inventory.tensors, self._numbers(None))

    def numbers_of_optimizers(self, segment: Segment | None) -> list[Any]:
        """Returns the optimizers' numbers, as they were when each took its step."""
        numbers: list[Any] = []
        for optimizer in self._programs.definition.optimizers:
            of_step = None if segment is None else segment.numbers.get(id(optimizer))
            numbers += (
                self._programs.settings[id(optimizer)].read()[1] if of_step is None else of_step
            )
        return numbers

    def _numbers(self, segment: Segment | None) -> tuple[Any, ...]:
        numbers = self.numbers_of_optimizers(segment)
        numbers += [self.trie.numbers[i] for i in self.calls.places]
        return tuple(numbers)

    def __call__(self, segment: Segment, inventory: Inventory) -> dict[int, Tensor]:
        """Runs the program with the inputs of this call.

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
            numbers: Numbers of the optimizers, then those of the record.
            batch: One tensor for each number of `calls.inputs`.
        """
        with record_if_profiled(self._name):
            results = self._run(tensors, numbers, batch)
        return dict(zip(self.outputs, results, strict=True))

    def _run(
        self, tensors: Sequence[Tensor], numbers: tuple[float, ...], batch: Sequence[Tensor]
    ) -> list[Any]:
        recording = self.recording
        inputs = [self._sent(numbers), *tensors]
        inputs += [tensors[i].grad for i in recording.gradient_slots]  # type: ignore[misc]
        inputs += self._given(batch)
        inputs += [batch[i].grad for i in recording.batch_with_gradient]  # type: ignore[misc]
        inputs += recording.aliases.bases
        if self._outside is not None and self._outside(inputs):
            raise OutOfRangeError
        with TRACING:  # which moves torch's generator, and puts it back
            draws = self._drawn()
        inputs += [*self.constants, *draws]
        taken: list[Any] = []
        try:
            self._programs.launches += 1
            self.compiled(inputs, taken)
            if self._flag is not None and self.compiled.outputs(taken)[self._flag]:
                taken.clear()
                raise OutOfRangeError
            outputs = self._leave_gradients(taken, tensors, batch)
        except BaseException:
            if taken:
                retry_until_complete(lambda: self._leave_gradients(taken, tensors, batch))
            raise
        return [outputs[i] for i in recording.results]

    def _given(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the batch; while steps are compared with eager that of all processes."""
        if self._ranks is None or not isinstance(self.compiled, VerifiedStep):
            return batch
        parallel = self._programs.definition.parallel
        assert parallel is not None
        return gathered_batch(self._ranks, parallel, batch, self._replicated)

    def _drawn(self) -> list[Tensor]:
        """Returns what the step draws; with several processes the same on all."""
        if self._ranks is None or not self.draws.calls:
            return self.draws()
        with self._ranks.share_rank0_generator():
            return self.draws()

    def _leave_gradients(
        self, taken: list[Any], tensors: Sequence[Tensor], batch: Sequence[Tensor]
    ) -> list[Tensor]:
        """Sets what gradients the step leaves; returns its outputs. May be repeated."""
        outputs = self.compiled.outputs(taken)
        for i in self.recording.cleared:
            if tensors[i].grad is not None:
                tensors[i].grad = None
        for output, i in self.recording.gradients:
            tensors[i].grad = outputs[output]
        for output, i in self.recording.batch_gradients:
            batch[i].grad = outputs[output]
        return outputs


def _report(backend: str, graph: Graph, seconds: float, from_disk: bool) -> GraphReport:
    report = GraphReport(backend, "step", executables=1, blocks=1, cache_hits=int(from_disk))
    report.note_compilation(Compilation((), 1, report.cache_hits, seconds))
    report.ops_on_backend = count_aten_calls(graph.calls)
    return report
