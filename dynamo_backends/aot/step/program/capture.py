"""Traces the calls of a record on fake tensors: forward, backward and update as one graph."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import (
    FakeTensorMode,
    disable_current_modes,
    mark_generator_state,
)
from dynamo_backends.aot.step.program.optimizer_calls import take_traced_step
from dynamo_backends.aot.step.program.optimizer_state import refusing_new_state, traced_settings
from dynamo_backends.aot.step.program.recording import (
    WHAT_TO_DO,
    Definition,
    Recording,
)
from dynamo_backends.aot.step.program.scalars import Scalars
from dynamo_backends.aot.step.program.straight_line import StraightLine
from dynamo_backends.aot.step.program.substitution import Substitution, call_and_collect_nodes
from dynamo_backends.aot.step.record.abstract import fake_of
from dynamo_backends.aot.step.source_lines import line_of, user_line
from dynamo_backends.aot.step.state.aliases import Aliases, Key
from dynamo_backends.aot.step.state.arguments import first_of_each, shared_memory
from dynamo_backends.aot.step.state.hyperparameters import group_constants, read_numbers
from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.graph.graph import Role
from dynamo_backends.graph.layouts import empty_strided_like
from dynamo_backends.interface.errors import StepCaptureError, error_text
from dynamo_backends.verify.mixed_dtypes import is_dtype_error, refuse_mixed_dtypes


def is_leaf(tensor: Tensor) -> bool:
    """Returns whether a tensor may have a gradient."""
    return tensor.is_leaf and (tensor.requires_grad or tensor.grad is not None)


class Gradients:
    """Gradients of tensors that a step is given.

    Args:
        leaves: The tensors that may have one when the step begins, by their positions.
        positions: Positions of the tensors that may have one when it ends.

    Attributes:
        entering: The gradients that are there when the step begins.
    """

    def __init__(self, leaves: Mapping[int, Tensor], positions: Iterable[int]):
        self.entering = {i: g for i, t in leaves.items() if (g := t.grad) is not None}
        self._positions = list(positions)
        self._entered: dict[int, Tensor] = {}
        self._fakes: Sequence[Any] = ()

    def attach(self, fakes: Sequence[Any], entering: Mapping[int, Tensor]) -> None:
        """Gives the tensors of a trace the gradients that they have when the step begins."""
        self._fakes = fakes
        for i, gradient in entering.items():
            fakes[i].grad = self._entered[i] = gradient

    def left(self) -> Iterator[tuple[int, Tensor]]:
        """Position and gradient of each tensor to which the traced step gave another one."""
        for i in self._positions:
            fake = self._fakes[i]
            if fake.is_leaf and fake.grad is not None and fake.grad is not self._entered.get(i):
                yield i, fake.grad

    def cleared(self) -> tuple[int, ...]:
        """Returns the positions of the tensors whose gradient the step takes away."""
        return tuple(i for i in self.entering if self._fakes[i].grad is None)


def trace_record(
    calls: StraightLine,
    definition: Definition,
    inventory: Inventory,
    batch: Sequence[Tensor],
    numbers_on: torch.device,
) -> Recording:
    """Traces the recorded calls of a step on fake tensors into one FX graph.

    Args:
        calls: To be traced.
        definition: Definition of the step.
        inventory: What lives on.
        batch: The tensors that the calls are given besides.
        numbers_on: The device of the tensor of all numbers.

    Raises:
        RuntimeError: Eager's, where an operator refuses the dtypes of its arguments.
        StepCaptureError: It cannot be one graph.
    """
    try:
        return _Recorder(calls, definition, inventory, batch, numbers_on).record()
    except StepCaptureError:
        raise
    except Exception as error:
        if is_dtype_error(error):
            raise
        raise StepCaptureError(
            f"the step cannot be captured as one graph: {type(error).__name__}: "
            f"{error_text(error)} (at {line_of(error)}). {WHAT_TO_DO}"
        ) from error


class _Recorder:
    def __init__(
        self,
        calls: StraightLine,
        definition: Definition,
        inventory: Inventory,
        batch: Sequence[Tensor],
        numbers_on: torch.device,
    ):
        self._calls = calls
        self._numbers_on = numbers_on
        self._optimizers = definition.optimizers
        self._inventory = inventory
        self._batch = batch
        self._mode = FakeTensorMode()
        optimizers, tensors = definition.optimizers, inventory.tensors
        settings = (i for i, slot in enumerate(inventory.slots) if slot.is_setting)
        self._living = tuple(i for i in settings if tensors[i].ndim == 0)
        numbers = [*read_numbers(optimizers), *calls.numbers]
        self._scalars = Scalars(numbers, [tensors[i].item() for i in self._living])
        self._substitution = Substitution(self._mode, self._scalars)
        parameters = set(inventory.parameters())
        leaves = {i: t for i, t in enumerate(tensors) if i in parameters or is_leaf(t)}
        self._leaves = tuple(leaves)
        self._gradients = Gradients(leaves, range(len(tensors)))
        in_batch = dict(enumerate(batch))
        self._first = first_of_each(in_batch, in_batch)
        self._overlapping = set(itertools.chain.from_iterable(shared_memory(batch)))
        leaves = {i: x for i, x in in_batch.items() if is_leaf(x) and self._first[i] == i}
        self._batch_gradients = Gradients(leaves, leaves)
        self._aliases = _aliases(inventory, self._gradients)
        self._outputs: list[Tensor] = []

    def record(self) -> Recording:
        inputs = list(self._inputs())
        constants = group_constants(self._optimizers)
        with refusing_new_state(self._optimizers), private.tracing_a_step(self._mode):
            module = private.make_fx(self._trace, None)(*(fake for fake, _, _ in inputs))
        undeclared = self._substitution.undeclared
        if undeclared:
            raise StepCaptureError(
                f"an optimizer uses {len(undeclared)} tensors that are neither inputs of the step "
                "nor state of its models and optimizers. Pass them as arguments, or pass "
                'fallback="split".'
            )
        if group_constants(self._optimizers) != constants:
            raise StepCaptureError(
                "an optimizer changes a Python scalar in its param_groups or state. A compiled "
                "graph would treat it as a constant. Store it as a tensor, or pass "
                'fallback="split".'
            )
        _drop_dead(module.graph)
        refuse_mixed_dtypes(module.graph)
        return self._recording(module, inputs)

    def _recording(
        self, module: fx.GraphModule, inputs: Sequence[tuple[Tensor, Role, str]]
    ) -> Recording:
        entering = list(self._gradients.entering)
        first = 1 + len(self._inventory.slots)
        read = self._read(module.graph, first)
        used = [True] * len(inputs)
        used[first : first + len(entering)] = [i in read for i in entering]
        _drop_inputs(module, used)
        fakes, roles, names = zip(*itertools.compress(inputs, used), strict=True)
        return Recording(
            module,
            fakes,
            roles,
            names,
            gradient_slots=tuple(i for i in entering if i in read),
            leaves=self._leaves,
            entering=tuple(entering),
            cleared=self._gradients.cleared(),
            answers=tuple(self._scalars.answers.values()),
            living=self._living,
            batch_with_gradient=tuple(self._batch_gradients.entering),
            aliases=self._aliases,
            **self._left,
        )

    def _read(self, graph: fx.Graph, first: int) -> set[int]:
        """Returns the slots whose gradients at the start the graph reads."""
        places = graph.find_nodes(op="placeholder")[first:]
        entering = zip(self._gradients.entering, places, strict=False)
        read = {i for i, place in entering if place.users}
        return read | {i for i, is_gradient in self._aliases.views if is_gradient}

    def _inputs(self) -> Iterator[tuple[Tensor, Role, str]]:
        """Yields for each input of the graph a fake tensor, its role and its name."""
        with self._mode:
            count = len(self._scalars.values)
            numbers = torch.empty(count, dtype=torch.float64, device=self._numbers_on)
        yield numbers, Role.HYPERPARAMETERS, "numbers"
        slots = self._inventory.slots
        for i, (slot, tensor) in enumerate(zip(slots, self._inventory.tensors, strict=True)):
            yield self._fake_of((i, False), tensor), slot.role, slot.name
        for i, gradient in self._gradients.entering.items():
            yield self._fake_of((i, True), gradient), Role.GRADIENT, f"{slots[i].name}.grad"
        for i, x in enumerate(self._batch):
            fake = self._fake_apart(x) if i in self._overlapping else self._fake(x)
            yield fake, Role.ACTIVATION, f"batch[{i}]"
        for i, gradient in self._batch_gradients.entering.items():
            yield self._fake(gradient), Role.ACTIVATION, f"batch[{i}].grad"
        for base, name in zip(self._aliases.bases, self._aliases.names, strict=True):
            yield self._fake(base), Role.BUFFER, name

    def _fake(self, tensor: Tensor) -> Tensor:
        return fake_of(self._mode, tensor)

    def _fake_of(self, key: Key, tensor: Tensor) -> Tensor:
        """Makes a fake tensor with memory of its own in place of one that shares memory."""
        return self._fake(tensor) if key not in self._aliases.views else self._fake_apart(tensor)

    def _fake_apart(self, tensor: Tensor) -> Tensor:
        """Makes a fake tensor with memory of its own."""
        with self._mode:
            fake = empty_strided_like(tensor)
        return fake.requires_grad_(tensor.requires_grad)

    def _view(self, key: Key, placeholder: Tensor, bases: Sequence[Tensor]) -> Tensor:
        view = self._aliases.views.get(key)
        if view is None:
            return placeholder
        return view.of(bases[view.base]).requires_grad_(placeholder.requires_grad)

    def _trace(self, *flat: Tensor) -> Any:
        count = len(flat) - len(self._aliases.bases)
        remaining, bases = iter(flat[:count]), flat[count:]
        scalars = self._stand_ins(next(remaining))
        self._stand_in_for_slots(remaining, bases)
        of_calls = len(scalars) - len(self._calls.numbers)
        batch = self._stand_in_for_batch(remaining)
        settings = traced_settings(self._optimizers, scalars[:of_calls])
        transforms = private.substituting_in_transforms(self._substitution.fake)
        with settings:
            with transforms, self._substitution, Provenance():
                results = self._calls(
                    batch,
                    scalars[of_calls:],
                    partial(take_traced_step, self._substitution),
                    self._substitution.is_number,
                )
            self._left = self._left_by(results)
        return self._outputs

    def _stand_ins(self, numbers: Tensor) -> list[Any]:
        """Returns tensors that stand in for numbers: of the optimizers, then of the calls."""
        scalars = [numbers[i] for i in range(len(self._scalars.values))]
        first = len(scalars) - len(self._calls.numbers)
        for i, number in enumerate(self._calls.numbers, first):
            scalars[i] = scalars[i].long() if isinstance(number, int) else scalars[i]
        return [self._scalars.add(scalar, i) for i, scalar in enumerate(scalars)]

    def _stand_in_for_slots(self, remaining: Iterator[Tensor], bases: Sequence[Tensor]) -> None:
        tensors = self._inventory.tensors
        fakes = [self._view((i, False), next(remaining), bases) for i in range(len(tensors))]
        for real, fake in zip(tensors, fakes, strict=True):
            self._substitution.add(real, fake)
        for number, i in enumerate(self._living):
            self._scalars.add_living(fakes[i], number)
        entering = {
            i: self._view((i, True), next(remaining), bases) for i in self._gradients.entering
        }
        self._gradients.attach(fakes, entering)

    def _stand_in_for_batch(self, remaining: Iterator[Tensor]) -> list[Tensor]:
        fakes = [next(remaining) for _ in self._batch]
        batch = [fakes[first] for first in self._first]
        entering = {i: next(remaining) for i in self._batch_gradients.entering}
        self._batch_gradients.attach(batch, entering)
        return batch

    def _left_by(self, results: Sequence[Any]) -> dict[str, Any]:
        """Returns results and gradients, by the names that a recording has for them."""
        return {
            "results": tuple(self._output(self._substitution.fake(x)) for x in results),
            "gradients": self._outputs_of(self._gradients),
            "batch_gradients": self._outputs_of(self._batch_gradients),
        }

    def _outputs_of(self, gradients: Gradients) -> tuple[tuple[int, int], ...]:
        return tuple((self._output(gradient), i) for i, gradient in gradients.left())

    def _output(self, fake: Tensor) -> int:
        self._outputs.append(fake.detach())
        return len(self._outputs) - 1


def _aliases(inventory: Inventory, gradients: Gradients) -> Aliases:
    tensors: dict[Key, Tensor] = {(i, False): t for i, t in enumerate(inventory.tensors)}
    tensors |= {(i, True): gradient for i, gradient in gradients.entering.items()}
    return Aliases(tensors, {(i, g): inventory.slots[i].name + ".grad" * g for i, g in tensors})


def _drop_inputs(module: fx.GraphModule, used: Sequence[bool]) -> None:
    for place, is_used in zip(module.graph.find_nodes(op="placeholder"), used, strict=True):
        if not is_used:
            module.graph.erase_node(place)
    module.recompile()


def _drop_dead(graph: fx.Graph) -> None:
    """Erases what nobody reads, and marks of the profiler."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and "profiler" in str(node.target) and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()


_LINE = re.compile(r"(.*?):(\d+)(?:, (.*))?")


class Provenance(TorchDispatchMode):
    """Notes on each node the user's line, and on draws the state of eager's generator.

    Nothing is drawn while tracing. The generator is moved on all the same, and put back in the
    end, so that a checkpoint that puts it back to draw again is seen to do so.
    """

    def __enter__(self) -> "Provenance":
        """Keeps the state of torch's generator."""
        self._before = torch.get_rng_state()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Puts the generator back."""
        super().__exit__(kind, error, trace)
        torch.set_rng_state(self._before)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Executes a call, and notes what there is to note on the nodes it leaves."""
        if func.namespace == "prim":  # a tensor's device, or its layout
            return func(*args, **(kwargs or {}))
        result, nodes = call_and_collect_nodes(partial(func, *args, **(kwargs or {})))
        _note_line(nodes)
        if torch.Tag.nondeterministic_seeded in func.tags:
            mark_generator_state(nodes, _next_state())
        return result


def _note_line(nodes: Sequence[fx.Node]) -> None:
    line = _LINE.fullmatch(user_line())
    if line is None:
        return
    for node in nodes:
        node.meta["stack_trace"] = 'File "{}", line {}, in step\n{}'.format(*line.groups(""))


def _next_state() -> str:
    """Names the state of torch's generator, and moves it on."""
    with disable_current_modes(), torch._C.DisableTorchFunction():
        state = torch.get_rng_state().numpy().tobytes()
        torch.rand(())
    return hashlib.sha256(state).hexdigest()
