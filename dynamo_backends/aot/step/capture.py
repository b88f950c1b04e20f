"""Runs a step function once on fake tensors and records it: forward, backward and update."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.aot.step.aliases import Aliases, Key
from dynamo_backends.aot.step.batches import (
    BatchSpec,
    first_of_each,
    flatten_batch,
    shared_memory,
    unflatten_batch,
)
from dynamo_backends.aot.step.bindings import Bindings
from dynamo_backends.aot.step.gradients import Gradients, SlotGradients, is_leaf
from dynamo_backends.aot.step.hyperparameters import group_constants
from dynamo_backends.aot.step.inventory import Inventory, Slot
from dynamo_backends.aot.step.loss_scaling import LossScaling
from dynamo_backends.aot.step.microbatches import StepCall
from dynamo_backends.aot.step.modules import modules_for_graphs
from dynamo_backends.aot.step.optimizers import traced_settings
from dynamo_backends.aot.step.outside import refuse_outside_effects
from dynamo_backends.aot.step.provenance import Provenance
from dynamo_backends.aot.step.python_state.calls import StandInRefused
from dynamo_backends.aot.step.python_state.following import Following
from dynamo_backends.aot.step.python_state.places import Place
from dynamo_backends.aot.step.recomputed import recomputed_by
from dynamo_backends.aot.step.recording import (
    WHAT_TO_DO,
    Definition,
    Recording,
    Result,
    UndeclaredTensors,
    numbers_of,
)
from dynamo_backends.aot.step.scalars import Scalars
from dynamo_backends.aot.step.sent_numbers import CPU
from dynamo_backends.aot.step.substitution import Substitution, fake_of, line_of, user_line
from dynamo_backends.graph.layouts import empty_as
from dynamo_backends.graph.roles import Role
from dynamo_backends.interface.errors import StepCaptureError, text_of
from dynamo_backends.verify.dtypes import is_dtype_error, refuse_mixed_dtypes


def record(
    definition: Definition,
    inventory: Inventory,
    batch: Sequence[Any],
    batch_spec: BatchSpec,
    promoted: Sequence[Place] = (),
    numbers_on: torch.device = CPU,
    python: Any = None,
) -> Recording:
    """Records one call.

    Args:
        definition: What to call.
        inventory: What lives on.
        batch: The leaves of its arguments; floats become inputs like the optimizers' numbers.
        batch_spec: How they are put together: positional and keyword arguments.
        promoted: Places in Python whose numbers are inputs, too.
        numbers_on: The device of the tensor of all numbers.
        python: What knows the function's numbers, if it reads nothing else in Python; None: the
            function's Python code is followed.

    Raises:
        RuntimeError: Eager's, where an operator refuses the dtypes of its arguments.
        UndeclaredTensors: Other tensors were used; record again with an inventory that has them.
        StandInRefused: A promoted number has to be a number; record again without it.
        StepCaptureError: It cannot be one graph.
    """
    refuse_outside_effects(definition.models, definition.optimizers, with_hooks=python is None)
    recorder = _Recorder(definition, inventory, batch, batch_spec, promoted, numbers_on, python)
    try:
        return recorder.record()
    except (StepCaptureError, UndeclaredTensors, StandInRefused):
        raise
    except Exception as error:
        if is_dtype_error(error):
            raise
        raise StepCaptureError(
            f"the step cannot be captured as one graph: {type(error).__name__}: {text_of(error)} "
            f"(at {line_of(error)}). {WHAT_TO_DO}"
        ) from error


class _Recorder:
    def __init__(
        self,
        definition: Definition,
        inventory: Inventory,
        batch: Sequence[Any],
        batch_spec: BatchSpec,
        promoted: Sequence[Place],
        numbers_on: torch.device,
        python: Any,
    ):
        self._numbers_on = numbers_on
        self._definition = definition
        self._inventory = inventory
        self._batch = batch
        self._batch_spec = batch_spec
        self._mode = FakeTensorMode()
        optimizers, tensors = definition.optimizers, inventory.tensors
        self._living = tuple(i for i, s in enumerate(inventory.slots) if _is_asked(s, tensors[i]))
        untracked = (x for x in batch if not isinstance(x, Tensor))
        self._python = python or Following(
            definition.function, definition.models, optimizers, untracked, promoted, user_line
        )
        numbers = [*numbers_of(definition, batch), *self._python.numbers]
        self._scalars = Scalars(numbers, [tensors[i].item() for i in self._living])
        self._scaling = LossScaling(optimizers)
        self._substitution = Substitution(self._mode, self._scalars, self._scaling)
        self._call = StepCall(
            optimizers,
            definition.models,
            definition.accumulate,
            self._optimizer_step,
            self._substitution.clearing,
        )
        self._gradients = SlotGradients(inventory, self._call, with_hooks=python is None)
        in_batch = {i: x for i, x in enumerate(batch) if isinstance(x, Tensor)}
        self._first = dict(zip(in_batch, first_of_each(in_batch, in_batch), strict=True))
        self._overlapping = set(itertools.chain.from_iterable(shared_memory(batch)))
        self._batch_gradients = Gradients(
            {i: x for i, x in in_batch.items() if is_leaf(x) and self._first[i] == i}
        )
        self._aliases = _aliases(inventory, self._gradients)
        self._outputs: list[Tensor] = []

    def record(self) -> Recording:
        optimizers = self._definition.optimizers
        inputs = list(self._inputs())
        constants = group_constants(optimizers)
        self._bindings = Bindings(self._definition.models, optimizers)
        with self._bindings.restored(), private.tracing_a_step(self._mode):
            module = private.make_fx(self._trace, None)(*(fake for fake, _, _ in inputs))
        if self._substitution.undeclared:
            raise UndeclaredTensors(self._places_of(self._substitution.undeclared))
        if group_constants(optimizers) != constants:
            raise StepCaptureError(
                "the step changes a setting or a number in an optimizer's param_groups or state "
                "that is not a tensor; it would stay what it is in a graph. Keep it as a tensor, "
                "or change it (call a scheduler) outside of the step."
            )
        _drop_dead(module.graph)
        refuse_mixed_dtypes(module.graph)
        return self._recording(module, inputs)

    def _recording(
        self, module: fx.GraphModule, inputs: Sequence[tuple[Tensor, Role, str]]
    ) -> Recording:
        entering = list(self._gradients.entering)
        first = 1 + len(self._inventory.slots)
        free = self._gradients.free(
            self._read(module.graph, first), self._substitution.gradients_read
        )
        used = [True] * len(inputs)
        used[first : first + len(entering)] = [i not in free for i in entering]
        _drop_inputs(module, used)
        fakes, roles, names = zip(*itertools.compress(inputs, used), strict=True)
        return Recording(
            module,
            fakes,
            roles,
            names,
            spec=self._spec,
            gradient_slots=tuple(i for i in entering if i not in free),
            leaves=self._gradients.slots,
            conditions=self._python.conditions(self._inventory.others),
            free=free,
            cleared=self._gradients.cleared(),
            answers=tuple(self._scalars.answers.values()),
            living=self._living,
            scalers=tuple(self._scaling.scalers),
            batch_with_gradient=tuple(self._batch_gradients.entering),
            promoted_types=list(map(type, self._python.numbers)),
            aliases=self._aliases,
            **self._left,
        )

    def _read(self, graph: fx.Graph, first: int) -> set[int]:
        """The slots whose gradients at the start the graph reads."""
        places = graph.find_nodes(op="placeholder")[first:]
        entering = zip(self._gradients.entering, places, strict=False)
        read = {i for i, place in entering if place.users}
        return read | {i for i, is_gradient in self._aliases.views if is_gradient}

    def _inputs(self) -> Iterator[tuple[Tensor, Role, str]]:
        """For each input of the graph a fake tensor, its role and its name."""
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
            if isinstance(x, Tensor):
                fake = self._fake_apart(x) if i in self._overlapping else self._fake(x)
                yield fake, Role.ACTIVATION, f"batch[{i}]"
        for i, gradient in self._batch_gradients.entering.items():
            yield self._fake(gradient), Role.ACTIVATION, f"batch[{i}].grad"
        for base, name in zip(self._aliases.bases, self._aliases.names, strict=True):
            yield self._fake(base), Role.BUFFER, name

    @contextlib.contextmanager
    def _optimizer_step(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[Callable[..., Any] | None]:
        with self._substitution.optimizer_step(optimizer) as formula:
            yield formula
        self._python.after_step_of(optimizer)

    def _places_of(self, undeclared: Sequence[Tensor]) -> list[Place]:
        found = self._python.places_of(undeclared)
        return [
            place or Place([tensor], 0, "a tensor", "an unknown line")
            for place, tensor in zip(found, undeclared, strict=True)
        ]

    def _fake(self, tensor: Tensor) -> Tensor:
        return fake_of(self._mode, tensor)

    def _fake_of(self, key: Key, tensor: Tensor) -> Tensor:
        """For what shares memory: a tensor that shares none, which nobody reads."""
        return self._fake(tensor) if key not in self._aliases.views else self._fake_apart(tensor)

    def _fake_apart(self, tensor: Tensor) -> Tensor:
        """For what shares memory: a tensor that shares none."""
        with self._mode:
            fake = empty_as(tensor)
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
        promoted = len(scalars) - len(self._python.numbers)
        of_batch = promoted - sum(isinstance(x, float) for x in self._batch)
        batch = self._stand_in_for_batch(remaining, iter(scalars[of_batch:promoted]))
        args, kwargs = unflatten_batch(batch, self._batch_spec)
        settings = traced_settings(self._definition.optimizers, scalars[:of_batch])
        transforms = private.transforms_given(self._substitution.fake)
        modules = modules_for_graphs(self._definition.models)
        with settings, self._python.set_up(scalars[promoted:]):
            tracing = (self._scaling, modules, transforms, self._substitution, Provenance())
            with contextlib.ExitStack() as stack:
                for each in (*tracing, self._python.follow()):
                    stack.enter_context(each)
                result = self._call(self._definition.function, args, kwargs)
            _check_arguments(batch, self._batch_spec, (args, kwargs))
            self._left = self._left_by(result)
        return self._outputs

    def _stand_ins(self, numbers: Tensor) -> list[Any]:
        """What stands in for numbers: of the optimizers, of the batch, then those in Python."""
        scalars = [numbers[i] for i in range(len(self._scalars.values))]
        first = len(scalars) - len(self._python.numbers)
        for i, number in enumerate(self._python.numbers, first):
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

    def _stand_in_for_batch(self, remaining: Iterator[Tensor], numbers: Iterator[Any]) -> list[Any]:
        batch = [
            next(remaining)
            if isinstance(x, Tensor)
            else next(numbers)
            if isinstance(x, float)
            else x
            for x in self._batch
        ]
        for i, first in self._first.items():
            batch[i] = batch[first]
        entering = {i: next(remaining) for i in self._batch_gradients.entering}
        self._batch_gradients.attach(batch, entering)
        return batch

    def _left_by(self, result: Any) -> dict[str, Any]:
        """What the step returns and leaves behind, by the names that a recording has for it."""
        leaves, self._spec = pytree.tree_flatten(result)
        self._slots = {id(t): i for i, t in enumerate(self._inventory.tensors)}

        def result_of(leaf: Any, _: Any) -> Result:
            return self._result_of(leaf)

        return {
            "results": tuple(map(self._result_of, leaves)),
            "gradients": self._outputs_of(self._gradients),
            "recomputed": tuple(recomputed_by(self._bindings.modules, self._output)),
            "batch_gradients": self._outputs_of(self._batch_gradients),
            "effects": tuple(self._python.effects(result_of)),
            "first": tuple(self._python.first(result_of)),
            "rebound": tuple(self._rebound_buffers()),  # the last outputs
        }

    def _outputs_of(self, gradients: Gradients) -> tuple[tuple[int, int], ...]:
        return tuple((self._output(gradient), i) for i, gradient in gradients.left())

    def _result_of(self, leaf: Any) -> Result:
        term = self._scalars.number(leaf)
        if term is not None:
            return Result("term", term)
        if not isinstance(leaf, Tensor):
            return Result("constant", leaf)
        if id(leaf) in self._slots:
            return Result("slot", self._slots[id(leaf)])
        return Result("output", self._output(self._substitution.fake(leaf)))

    def _rebound_buffers(self) -> Iterator[tuple[int, int]]:
        for name, before, now in self._bindings.replaced_buffers():
            slot = self._slots[id(before)]
            if (slot, False) in self._aliases.views:
                raise StepCaptureError(
                    f"the step replaces the buffer {name}, which shares memory with another "
                    f"tensor. Write to it instead. {WHAT_TO_DO}"
                )
            if now.shape != before.shape or now.dtype != before.dtype:
                raise StepCaptureError(
                    f"the step replaces the buffer {name} by one of another shape or dtype: "
                    f"{now.dtype}{list(now.shape)} instead of "
                    f"{before.dtype}{list(before.shape)}. {WHAT_TO_DO}"
                )
            yield self._output(now), slot

    def _output(self, fake: Tensor) -> int:
        self._outputs.append(fake.detach())
        return len(self._outputs) - 1


def _aliases(inventory: Inventory, gradients: Gradients) -> Aliases:
    tensors: dict[Key, Tensor] = {(i, False): t for i, t in enumerate(inventory.tensors)}
    tensors |= {(i, True): gradient for i, gradient in gradients.entering.items()}
    return Aliases(tensors, {(i, g): inventory.slots[i].name + ".grad" * g for i, g in tensors})


def _check_arguments(batch: Sequence[Any], spec: BatchSpec, arguments: Any) -> None:
    after, spec_after = flatten_batch(arguments)
    if spec_after != spec or any(a is not b for a, b in zip(batch, after, strict=True)):
        raise StepCaptureError(
            "the step changes one of its arguments (adds, replaces or removes an item or an "
            f"attribute). Copy it first, or return the new value. {WHAT_TO_DO}"
        )


def _is_asked(slot: Slot, tensor: Tensor) -> bool:
    """Whether Python code may ask of a slot: a counter, or a hyper-parameter that is a tensor."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    is_counter = slot.role is Role.BUFFER and is_integer
    return tensor.ndim == 0 and (slot.is_setting or is_counter)


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
