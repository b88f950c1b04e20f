"""One compiled program of a step: it may run as long as its guards hold."""

import struct
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import TensorProperties
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.aot.step.mesh.across import gathered_batch, ranks_of
from dynamo_backends.aot.step.program.backends import (
    StepBackend,
    refuse_shared_writes,
    refuse_sparse,
    refused_by,
)
from dynamo_backends.aot.step.program.capture import record
from dynamo_backends.aot.step.program.draws import hoist
from dynamo_backends.aot.step.program.mesh_layout import layout_of
from dynamo_backends.aot.step.program.recording import Definition, Recording
from dynamo_backends.aot.step.program.step_graph import (
    functionalize,
    without_effects,
    without_updates,
)
from dynamo_backends.aot.step.program.straight_line import StraightLine
from dynamo_backends.aot.step.program.verified import VerifiedStep
from dynamo_backends.aot.step.state.arguments import shared_memory
from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.graph.canonicalize import CANONICALIZE
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.partition import count_ops
from dynamo_backends.graph.passes import PassSequence
from dynamo_backends.graph.position_checks import (
    PositionChecks,
    with_position_checks,
    with_updates_withheld,
)
from dynamo_backends.graph.properties import NORMAL_FORM, Property
from dynamo_backends.graph.random import SEPARATE_DRAWS
from dynamo_backends.interface.counters import keep_count_of
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.publishing import publish
from dynamo_backends.interface.report import Compilation, GraphReport
from dynamo_backends.runtime.atomic import until_done
from dynamo_backends.runtime.position_checks import OutOfRangeError, OutsideInputs
from dynamo_backends.runtime.program import graph_name, profiled_as

CPU = torch.device("cpu")


class SentNumbers:
    """The numbers as a tensor; to another device than the host they are sent when they change.

    Args:
        device: Where the graph reads them.
    """

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
        self._leaves = [i for i in recording.leaves if i not in recording.free]
        self._have_gradients = [tensors[i].grad is not None for i in self._leaves]
        self._with = recording.gradient_slots
        self._gradient_kinds = self._kinds_of_gradients(tensors)
        self._answers = recording.answers
        self._living = recording.living
        self._asked = {i for answer in recording.answers for i in answer.term.living()}
        self._numbers: tuple[float, ...] | None = None
        self._aliases = recording.aliases

    def why_not(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> str | None:
        """Returns why the recording cannot be used; None if it can.

        Args:
            tensors: One per slot.
            numbers: The numbers of this step.
        """
        if not self._properties.hold(tensors):
            return "a parameter, buffer or state has another shape, layout, dtype or requires_grad"
        if [tensors[i].grad is not None for i in self._leaves] != self._have_gradients:
            return "there are gradients where there were none, or the other way round"
        if self._with and self._kinds_of_gradients(tensors) != self._gradient_kinds:
            return "a gradient has another layout or dtype"
        values = self._values(tensors, numbers)
        if values != self._numbers:
            if not all(answer.holds(values) for answer in self._answers):
                return "a number that the step asks for (such as weight_decay != 0) changed"
            self._numbers = values
        if not self._aliases.hold(tensors):
            return "tensors share memory in another way, or have moved"
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


def _device_of(inventory: Inventory) -> torch.device:
    return next((t.device for t in inventory.tensors if t.device.type != "cpu"), CPU)


class Variant:
    """The calls of a record, traced and compiled.

    Args:
        calls: To be traced.
        definition: Of the step.
        backend: What compiles it.
        inventory: What lives on.
        batch: The tensors that the calls are given besides.
        pure: What it returns is computed, and nothing is changed.
        replicated: On a mesh the positions of tensors that every device has whole.

    Attributes:
        definition: Of the step.
        recording: Of the calls.
        slots: What lives from step to step.
        graph: What was compiled.
        program: Compiled from it.
        constants: Tensors that the graph owns.
        draws: Draws its random numbers.
        guards: When it may be used.
        report: Of the graph.
        checks: What is checked of each step.
        last_used: The highest is that of the last step.

    Raises:
        StepCaptureError: It cannot be one graph, or the backend cannot run all of it.
    """

    def __init__(
        self,
        calls: StraightLine,
        definition: Definition,
        backend: StepBackend,
        inventory: Inventory,
        batch: Sequence[Tensor],
        pure: bool = False,
        replicated: frozenset[int] = frozenset(),
    ):
        self._replicated = replicated
        start = time.perf_counter()
        where = _device_of(inventory) if backend.numbers_with_tensors else CPU
        recording = record(calls, definition, inventory, batch, where)
        if pure:
            recording = without_effects(recording)
        self._sent = SentNumbers(where)
        self.recording = recording
        self.last_used = 0
        self.definition = definition
        self.slots = tuple(inventory.slots)
        self.guards = Guards(inventory, recording)
        with refused_by(backend.name):
            step = functionalize(recording, backend.decompositions)
            step = without_updates(step) if pure else step
            _PASSES(step.graph)
            refuse_sparse(step.graph, backend.name)
            refuse_shared_writes(step.graph, recording.names, batch, shared_memory(batch))
            checks = self._checks(step.graph, step.constants, backend)
            self.graph, self.draws = hoist(checks.graph, backend.draws_seeds)
            self.constants = step.constants
            captured = time.perf_counter()
            self._ranks = ranks_of(definition.parallel)
            self._parallel = definition.parallel
            if definition.parallel is None or backend.compile_on_mesh is None:
                self.program: StepProgram = backend.compile(self.graph)
            else:
                spread = definition, inventory, recording, batch
                layout = layout_of(definition.parallel, self.graph, *spread, replicated)
                self.program = backend.compile_on_mesh(self.graph, layout)
        seconds = time.perf_counter() - captured
        self.report = _report(backend.name, self.graph, seconds, self.program.from_disk)
        keep_count_of(self.program)
        self.program.report_to(self.report)
        if backend.verify != "off":
            self.program = self._verified(self.program, backend)
        self.capture_seconds = captured - start
        self._name = graph_name(self.report)
        publish(self.report)

    def _checks(
        self, graph: Graph, constants: Sequence[Tensor], backend: StepBackend
    ) -> PositionChecks:
        """Returns the graph with what compiled code does not check, on CPUs."""
        values = (place.meta["val"] for place in graph.placeholders)
        on_cpu = all(v.device.type == "cpu" for v in values if isinstance(v, Tensor))
        if not on_cpu or backend.home is not None or self.definition.parallel is not None:
            checks = PositionChecks(graph)
        else:
            checks = with_updates_withheld(with_position_checks(graph, constants))
        self._outside = None if checks.before is None else OutsideInputs(checks.before)
        self._flag = None if checks.flag is None else checks.flag - len(graph.updates)
        self.checks = checks
        return checks

    def _verified(self, program: StepProgram, backend: StepBackend) -> StepProgram:
        return VerifiedStep(
            program,
            self.graph,
            self.report,
            lambda settled: setattr(self, "program", settled),
            always=backend.verify == "always",
            # What a rank alone takes in eager is no step of all of them.
            strict=backend.strict or self._ranks is not None,
            reduced=backend.reduced,
        )

    def __call__(
        self, tensors: Sequence[Tensor], numbers: tuple[float, ...], batch: Sequence[Tensor]
    ) -> list[Any]:
        """Runs it.

        Args:
            tensors: One per slot of the inventory.
            numbers: The numbers of this step.
            batch: The tensors that the calls are given besides.

        Returns:
            What the calls return.

        Raises:
            OutOfRangeError: Positions are out of range; nothing has changed.
        """
        with profiled_as(self._name):
            return self._run(tensors, numbers, batch)

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
            self.program(inputs, taken)
            if self._flag is not None and self.program.outputs(taken)[self._flag]:
                taken.clear()
                raise OutOfRangeError
            outputs = self._leave_gradients(taken, tensors, batch)
        except BaseException:
            if taken:
                until_done(lambda: self._leave_gradients(taken, tensors, batch))
            raise
        return [outputs[i] for i in recording.results]

    def _given(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the batch; while steps are compared with eager that of all processes."""
        if self._ranks is None or not isinstance(self.program, VerifiedStep):
            return batch
        assert self._parallel is not None
        return gathered_batch(self._ranks, self._parallel, batch, self._replicated)

    def _drawn(self) -> list[Tensor]:
        """Returns what the step draws; with several processes the same on all."""
        if self._ranks is None or not self.draws.calls:
            return self.draws()
        with self._ranks.drawing():
            return self.draws()

    def _leave_gradients(
        self, taken: list[Any], tensors: Sequence[Tensor], batch: Sequence[Tensor]
    ) -> list[Tensor]:
        """Sets what gradients the step leaves; returns its outputs. May be repeated."""
        outputs = self.program.outputs(taken)
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
    report.ops_on_backend = count_ops(graph.calls)
    return report
