"""What is kept of a compiled step in a file, and why some steps cannot be kept."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynamo_backends.aot.step.program.backends import StepBackend
from dynamo_backends.aot.step.program.draws import Draws
from dynamo_backends.aot.step.program.programs import StepProgram
from dynamo_backends.aot.step.program.recording import Definition, Recording, Result
from dynamo_backends.aot.step.state.arguments import BatchSpec
from dynamo_backends.aot.step.state.inventory import Slot
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.position_checks import PositionChecks
from dynamo_backends.graph.random import is_random
from dynamo_backends.interface.errors import SaveError


@dataclass(frozen=True)
class Snapshot:
    """One compiled step as it is now.

    Attributes:
        definition: Of the step.
        backend: What has compiled it.
        options: Of the backend, as they were given.
        graph: What was compiled. Its inputs are the numbers, then `tensors`, gradients that it does
            not read, the tensors of the batch, `constants` and what `draws` draws.
        program: Compiled from it.
        recording: Of its calls.
        results: One per leaf of what the function returned.
        spec: How these are put together.
        slots: What lives from step to step.
        tensors: One per slot.
        constants: Tensors that the graph owns.
        draws: Draws its random numbers.
        batch: How the arguments are put together.
        leaves: What the step was compiled for of each leaf, see `kind_of_leaf`.
        checks: What is checked of each step.
    """

    definition: Definition
    backend: StepBackend
    options: Mapping[str, Any]
    graph: Graph
    program: StepProgram
    recording: Recording
    results: Sequence[Result]
    spec: Any
    slots: Sequence[Slot]
    tensors: Sequence[Tensor]
    constants: Sequence[Tensor]
    draws: Draws
    batch: BatchSpec
    leaves: Sequence[Any]
    checks: PositionChecks

    def check(self) -> None:
        """Checks that a file can hold all that the step does.

        Raises:
            SaveError: It cannot; the message says why.
        """
        reason = next(self._reasons(), None)
        if reason is not None:
            raise SaveError(f"the step cannot be saved: {reason}.")

    def _reasons(self) -> Iterator[str]:
        recording = self.recording
        if self.definition.parallel is not None:
            yield "it is spread over a mesh"
        if self.backend.home is not None:
            yield f"its state lives on the {self.backend.home}"
        if any(t.device.type != "cpu" for t in (*self.tensors, *self.constants)):
            yield "its tensors are not on the CPU"
        if self.program.prefers_eager or self.program.comparison is not None:
            yield f"{self.backend.name} takes its steps in eager, or has not yet decided"
        yield from self._reasons_of_gradients()
        if recording.aliases.bases:
            yield f"tensors of it share memory ({', '.join(recording.aliases.names)})"
        if any(x.is_meta or x.is_sparse for x in self.tensors):
            yield "a tensor of it is sparse, or has no contents"
        if any(any(True for _ in answer.term.living()) for answer in recording.answers):
            yield "a counter, or a setting that is a tensor, decides what it does"
        for node in filter(is_random, self.graph.calls):
            yield f"{node.target} draws random numbers that depend on what the step computes"

    def _reasons_of_gradients(self) -> Iterator[str]:
        recording = self.recording
        entering = recording.gradient_slots
        places = self.graph.placeholders[1 + len(self.slots) :]
        found = [i for i, place in zip(entering, places, strict=False) if place.users]
        known = recording.free.union(entering)  # these are there again before the next step
        found += [i for _, i in recording.gradients if i not in known]
        for i in found:
            yield (
                f"it adds to the gradient of {self.slots[i].name} that the step before has left. "
                "Call optimizer.zero_grad(), which sets it to None, in the function"
            )
        if recording.batch_gradients or recording.batch_with_gradient:
            yield "it leaves gradients of its arguments; pass them detached"
