"""Runs a step function once on fake tensors and records it: forward, backward and update."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import FakeTensor, FakeTensorMode
from dynamo_backends.aot.step.aliases import Aliases, Key
from dynamo_backends.aot.step.batches import BatchSpec, flatten_batch, unflatten_batch
from dynamo_backends.aot.step.hooks import carry_over
from dynamo_backends.aot.step.hyperparameters import group_constants, group_numbers, read_number
from dynamo_backends.aot.step.inventory import Inventory, Slot
from dynamo_backends.aot.step.loss_scaling import LossScaling
from dynamo_backends.aot.step.microbatches import StepCall
from dynamo_backends.aot.step.modules import modules_for_graphs
from dynamo_backends.aot.step.optimizers import traced_settings
from dynamo_backends.aot.step.outside import refuse_outside_effects
from dynamo_backends.aot.step.provenance import Provenance
from dynamo_backends.aot.step.python_state.calls import StandInRefused
from dynamo_backends.aot.step.python_state.effects import Effect
from dynamo_backends.aot.step.python_state.following import Conditions, Following
from dynamo_backends.aot.step.python_state.places import Place
from dynamo_backends.aot.step.recomputed import Recomputed, names_recomputed, recomputed_by
from dynamo_backends.aot.step.scalars import Answer, Scalars
from dynamo_backends.aot.step.substitution import Substitution, line_of, user_line
from dynamo_backends.graph.roles import Role
from dynamo_backends.interface.errors import StepCaptureError, text_of

WHAT_TO_DO = (
    'Change the function so that it is one graph, or pass fallback="split" to compile the parts of '
    "it with torch.compile."
)


@dataclass(frozen=True)
class Definition:
    """What is to be captured.

    Attributes:
        function: The user's step function.
        models: Whose parameters and buffers it uses.
        optimizers: That it steps.
        accumulate: In how many parts it takes a batch.
    """

    function: Callable[..., Any]
    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    accumulate: int = 1


@dataclass(frozen=True)
class Result:
    """Where one leaf of the function's result comes from.

    Attributes:
        kind: "output" of the graph, "slot" (a tensor that lives on), "term" or "constant".
        value: Position of the output or slot, the term, or the constant.
    """

    kind: str
    value: Any


@dataclass(frozen=True)
class Recording:
    """A step as a graph that still writes to its inputs.

    Attributes:
        module: The graph. Inputs: numbers, slots, gradients, batch.
        fakes: One per input.
        roles: One per input.
        names: One per input.
        results: One per leaf of what the function returned.
        spec: How the leaves are put together.
        gradient_slots: Slots whose gradients at the start are inputs.
        leaves: Slots that may have gradients.
        gradients: Output and slot of each gradient that is left when the step ends.
        batch_gradients: The same for tensors of the batch: output and position.
        rebound: Output and slot of each buffer that was replaced instead of written to.
        effects: What the step does in Python.
        first: What of that comes before the numbers are read.
        conditions: What it found in Python.
        free: Slots whose gradients at the start do not matter.
        cleared: Slots whose gradient the step takes away.
        answers: What the function was told about numbers.
        living: Slots whose values the terms of these answers have after the numbers.
        scalers: Of losses (GradScaler) that it uses.
        recomputed: Attributes of modules that outputs belong to.
        batch_with_gradient: Positions of tensors of the batch whose gradients are inputs.
        promoted_types: Of the numbers in Python that are inputs.
        aliases: Memory that several slots share; it is the last inputs.
    """

    module: fx.GraphModule
    fakes: tuple[Tensor, ...]
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    results: tuple[Result, ...]
    spec: Any
    gradient_slots: tuple[int, ...]
    leaves: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    batch_gradients: tuple[tuple[int, int], ...]
    rebound: tuple[tuple[int, int], ...]
    effects: tuple[Effect, ...]
    first: tuple[Effect, ...]
    conditions: Conditions
    free: frozenset[int]
    cleared: tuple[int, ...]
    answers: tuple[Answer, ...]
    living: tuple[int, ...]
    scalers: tuple[Any, ...]
    recomputed: tuple[Recomputed, ...]
    batch_with_gradient: tuple[int, ...]
    promoted_types: list[type]
    aliases: Aliases


class UndeclaredTensors(Exception):
    """The step used tensors that are neither given to it nor of its models and optimizers.

    Args:
        places: Where they live; a tensor that is found nowhere lives in a list of its own.
    """

    def __init__(self, places: Sequence[Place]):
        super().__init__(f"{len(places)} tensors by closure")
        self.places = list(places)


def record(
    definition: Definition,
    inventory: Inventory,
    batch: Sequence[Any],
    batch_spec: BatchSpec,
    promoted: Sequence[Place] = (),
) -> Recording:
    """Records one call.

    Args:
        definition: What to call.
        inventory: What lives on.
        batch: The leaves of its arguments; floats become inputs like the optimizers' numbers.
        batch_spec: How they are put together: positional and keyword arguments.
        promoted: Places in Python whose numbers are inputs, too.

    Raises:
        UndeclaredTensors: Other tensors were used; record again with an inventory that has them.
        StandInRefused: A promoted number has to be a number; record again without it.
        StepCaptureError: It cannot be one graph.
    """
    refuse_outside_effects(definition.models, definition.optimizers)
    recorder = _Recorder(definition, inventory, batch, batch_spec, promoted)
    try:
        return recorder.record()
    except (StepCaptureError, UndeclaredTensors, StandInRefused):
        raise
    except Exception as error:
        raise StepCaptureError(
            f"the step cannot be captured as one graph: {type(error).__name__}: {text_of(error)} "
            f"(at {line_of(error)}). {WHAT_TO_DO}"
        ) from error


def numbers_of(definition: Definition, batch: Sequence[Any]) -> list[Any]:
    """The numbers that are inputs: of the optimizers, then of the batch."""
    numbers = [read_number(place) for place in group_numbers(definition.optimizers)]
    return numbers + [x for x in batch if isinstance(x, float)]


class _Recorder:
    def __init__(
        self,
        definition: Definition,
        inventory: Inventory,
        batch: Sequence[Any],
        batch_spec: BatchSpec,
        promoted: Sequence[Place],
    ):
        self._definition = definition
        self._inventory = inventory
        self._batch = batch
        self._batch_spec = batch_spec
        self._mode = FakeTensorMode()
        tensors = inventory.tensors
        self._living = tuple(i for i, s in enumerate(inventory.slots) if _is_asked(s, tensors[i]))
        values = [tensors[i].item() for i in self._living]
        self._python = Following(
            definition.function,
            definition.models,
            definition.optimizers,
            (x for x in batch if not isinstance(x, Tensor)),
            promoted,
            user_line,
        )
        numbers = [*numbers_of(definition, batch), *self._python.numbers]
        self._scalars = Scalars(numbers, values)
        self._scaling = LossScaling(definition.optimizers)
        self._substitution = Substitution(self._mode, self._scalars, self._scaling)
        self._run = StepCall(
            definition.optimizers,
            definition.models,
            definition.accumulate,
            self._optimizer_step,
            self._substitution.clearing,
        )
        self._leaves = leaves_of(inventory)
        self._with_gradient = [i for i in self._leaves if tensors[i].grad is not None]
        self._batch_leaves = [
            i for i, x in enumerate(batch) if isinstance(x, Tensor) and is_leaf(x)
        ]
        shared = {(i, False): t for i, t in enumerate(tensors)}
        shared |= {(i, True): g for i in self._with_gradient if (g := tensors[i].grad) is not None}
        names = {(i, g): inventory.slots[i].name + ".grad" * g for i, g in shared}
        self._aliases = Aliases(shared, names)
        self._outputs: list[Tensor] = []
        self._entry: dict[int, Tensor] = {}
        self._batch_entry: dict[int, Tensor] = {}
        self._touched: set[int] = set()
        self._held: list[Any] = []

    def record(self) -> Recording:
        fakes, roles, names = self._inputs()
        constants = group_constants(self._definition.optimizers)
        kept = [(state, dict.fromkeys(state)) for state in _states(self._definition.optimizers)]
        bindings = [(m, dict(vars(m)), dict(m._buffers)) for m in _modules(self._definition.models)]
        self._bindings = bindings
        try:
            with private.tracing_a_step(self._mode):
                module = private.make_fx(self._trace, None)(*fakes)
            _check_leaks(bindings, kept)
        finally:
            _put_back(bindings, kept)
        if self._substitution.undeclared:
            raise UndeclaredTensors(self._places_of(self._substitution.undeclared))
        if group_constants(self._definition.optimizers) != constants:
            raise StepCaptureError(
                "the step changes a setting or a number in an optimizer's param_groups or state "
                "that is not a tensor; it would stay what it is in a graph. Keep it as a tensor, "
                "or change it (call a scheduler) outside of the step."
            )
        _drop_dead(module.graph)
        free = self._free(module)
        used = [i not in free for i in self._with_gradient]
        conditions = self._python.conditions(self._inventory.others)
        first = 1 + len(self._inventory.slots)
        kept_inputs = [*(True for _ in range(first)), *used]
        kept_inputs += [True] * (len(fakes) - len(kept_inputs))
        _drop_inputs(module, kept_inputs)
        return Recording(
            module,
            tuple(itertools.compress(fakes, kept_inputs)),
            tuple(itertools.compress(roles, kept_inputs)),
            tuple(itertools.compress(names, kept_inputs)),
            self._results,
            self._spec,
            tuple(itertools.compress(self._with_gradient, used)),
            tuple(self._leaves),
            self._gradients,
            self._batch_gradients,
            self._rebound,
            self._effects,
            self._first,
            conditions,
            free,
            self._cleared(),
            tuple(self._scalars.answers.values()),
            self._living,
            tuple(self._scaling.scalers),
            self._recomputed,
            tuple(i for i in self._batch_leaves if self._batch[i].grad is not None),
            list(map(type, self._python.numbers)),
            self._aliases,
        )

    def _inputs(self) -> tuple[list[Tensor], list[Role], list[str]]:
        with self._mode:
            numbers = torch.empty(len(self._scalars.values), dtype=torch.float64)
        tensors = self._inventory.tensors
        fakes = [numbers, *(self._fake_of((i, False), t) for i, t in enumerate(tensors))]
        roles, names = [Role.HYPERPARAMETERS], ["numbers"]
        roles += [s.role for s in self._inventory.slots]
        names += [s.name for s in self._inventory.slots]
        for i in self._with_gradient:
            gradient: Any = tensors[i].grad
            fakes.append(self._fake_of((i, True), gradient))
            roles.append(Role.GRADIENT)
            names.append(f"{self._inventory.slots[i].name}.grad")
        for i, x in enumerate(self._batch):
            if isinstance(x, Tensor):
                fakes.append(self._fake(x))
                roles.append(Role.ACTIVATION)
                names.append(f"batch[{i}]")
        for i in self._batch_leaves:
            if self._batch[i].grad is not None:
                fakes.append(self._fake(self._batch[i].grad))
                roles.append(Role.ACTIVATION)
                names.append(f"batch[{i}].grad")
        fakes += map(self._fake, self._aliases.bases)
        roles += [Role.BUFFER] * len(self._aliases.bases)
        names += self._aliases.names
        return fakes, roles, names

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
        return self._mode.from_tensor(tensor, static_shapes=True)

    def _fake_of(self, key: Key, tensor: Tensor) -> Tensor:
        """For what shares memory: a tensor that shares none, which nobody reads."""
        if key not in self._aliases.views:
            return self._fake(tensor)
        with self._mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        return fake.requires_grad_(tensor.requires_grad)

    def _view(self, key: Key, placeholder: Tensor, bases: Sequence[Tensor]) -> Tensor:
        view = self._aliases.views.get(key)
        if view is None:
            return placeholder
        return view.of(bases[view.base]).requires_grad_(placeholder.requires_grad)

    def _trace(self, *flat: Tensor) -> Any:
        count = len(flat) - len(self._aliases.bases)
        remaining, bases = iter(flat[:count]), flat[count:]
        numbers = next(remaining)
        scalars = [numbers[i] for i in range(len(self._scalars.values))]
        first = len(scalars) - len(self._python.numbers)
        for i, number in enumerate(self._python.numbers, first):
            scalars[i] = scalars[i].long() if isinstance(number, int) else scalars[i]
        scalars = [self._scalars.add(scalar, i) for i, scalar in enumerate(scalars)]
        fakes = [
            self._view((i, False), next(remaining), bases)
            for i in range(len(self._inventory.slots))
        ]
        for real, fake in zip(self._inventory.tensors, fakes, strict=True):
            self._substitution.add(real, fake)
        for number, i in enumerate(self._living):
            self._scalars.add_living(fakes[i], number)
        for i in self._with_gradient:
            fakes[i].grad = self._entry[i] = self._view((i, True), next(remaining), bases)
        for i in self._leaves:
            if fakes[i].requires_grad and fakes[i].is_leaf:
                fakes[i].register_post_accumulate_grad_hook(_toucher(self, i))
                self._held.append(carry_over(self._inventory.tensors[i], fakes[i]))
        count = sum(1 for _ in group_numbers(self._definition.optimizers))
        promoted = len(self._python.numbers)
        given = iter(scalars[count:])
        batch = [
            next(remaining) if isinstance(x, Tensor) else next(given) if isinstance(x, float) else x
            for x in self._batch
        ]
        for i in self._batch_leaves:
            if self._batch[i].grad is not None:
                batch[i].grad = self._batch_entry[i] = next(remaining)
        self._fakes, self._batch_fakes = fakes, batch
        args, kwargs = unflatten_batch(batch, self._batch_spec)
        settings = traced_settings(self._definition.optimizers, scalars[:count])
        transforms = private.transforms_given(self._substitution.fake)
        modules = modules_for_graphs(self._definition.models)
        stand_ins = scalars[len(scalars) - promoted :]
        with settings, self._python.set_up(stand_ins):
            tracing = (self._scaling, modules, transforms, self._substitution, Provenance())
            with contextlib.ExitStack() as stack:
                for each in (*tracing, self._python.follow()):
                    stack.enter_context(each)
                result = self._run(self._definition.function, args, kwargs)
            _check_arguments(batch, self._batch_spec, (args, kwargs))
            self._keep(result)
        return self._outputs

    def _keep(self, result: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(result)
        slots = {id(t): i for i, t in enumerate(self._inventory.tensors)}
        self._slots = slots
        self._results = tuple(self._result_of(leaf) for leaf in leaves)
        self._gradients = tuple(
            (self._output(fake.grad), i)
            for i, fake in enumerate(self._fakes)
            if fake.is_leaf and fake.grad is not None and fake.grad is not self._entry.get(i)
        )
        self._recomputed = tuple(recomputed_by(self._bindings, self._output))
        batch = ((i, self._batch_fakes[i].grad) for i in self._batch_leaves)
        self._batch_gradients = tuple(
            (self._output(grad), i)
            for i, grad in batch
            if grad is not None and grad is not self._batch_entry.get(i)
        )
        self._effects = tuple(self._python.effects(lambda leaf, _: self._result_of(leaf)))
        self._first = tuple(self._python.first(lambda leaf, _: self._result_of(leaf)))
        self._rebound = tuple(self._rebound_buffers(slots))

    def _result_of(self, leaf: Any) -> Result:
        term = self._scalars.number(leaf)
        if term is not None:
            return Result("term", term)
        if not isinstance(leaf, Tensor):
            return Result("constant", leaf)
        if id(leaf) in self._slots:
            return Result("slot", self._slots[id(leaf)])
        return Result("output", self._output(self._substitution.fake(leaf)))

    def _rebound_buffers(self, slots: dict[int, int]) -> Iterator[tuple[int, int]]:
        for module, _, buffers in self._bindings:
            for key, before in buffers.items():
                now = module._buffers.get(key)
                if now is before or before is None or not isinstance(now, FakeTensor):
                    continue
                if (slots[id(before)], False) in self._aliases.views:
                    raise StepCaptureError(
                        f"the step replaces the buffer {key!r} of {type(module).__name__}, which "
                        f"shares memory with another tensor. Write to it instead. {WHAT_TO_DO}"
                    )
                if now.shape != before.shape or now.dtype != before.dtype:
                    raise StepCaptureError(
                        f"the step replaces the buffer {key!r} of {type(module).__name__} by one "
                        f"of another shape or dtype: {now.dtype}{list(now.shape)} instead of "
                        f"{before.dtype}{list(before.shape)}. {WHAT_TO_DO}"
                    )
                yield self._output(now), slots[id(before)]

    def _output(self, fake: Tensor) -> int:
        self._outputs.append(fake.detach())
        return len(self._outputs) - 1

    def touch(self, slot: int) -> None:
        """A gradient has been accumulated."""
        self._touched.add(slot)
        self._run.begun = True

    def _cleared(self) -> tuple[int, ...]:
        changed = self._touched | set(self._with_gradient) | self._slots_of(self._run.cleared)
        changed |= self._slots_of(self._run.cleared_late)
        return tuple(i for i in sorted(changed) if self._fakes[i].grad is None)

    def _slots_of(self, parameters: set[int]) -> set[int]:
        return {i for i, t in enumerate(self._inventory.tensors) if id(t) in parameters}

    def _free(self, module: fx.GraphModule) -> frozenset[int]:
        """Slots whose gradients at the start do not matter: not asked for, or thrown away."""
        places = module.graph.find_nodes(op="placeholder")[1 + len(self._inventory.slots) :]
        entries = zip(self._with_gradient, places, strict=False)
        read = {i for i, place in entries if place.users}
        read |= {i for i, is_gradient in self._aliases.views if is_gradient}
        asked = {i for i in self._leaves if id(self._fakes[i]) in self._substitution.gradients_read}
        unasked = set(self._leaves) - asked - self._touched
        return frozenset((unasked | self._slots_of(self._run.cleared)) - read)


def _check_arguments(batch: Sequence[Any], spec: BatchSpec, arguments: Any) -> None:
    after, spec_after = flatten_batch(arguments)
    if spec_after != spec or any(a is not b for a, b in zip(batch, after, strict=True)):
        raise StepCaptureError(
            "the step changes one of its arguments (adds, replaces or removes an item or an "
            f"attribute). Copy it first, or return the new value. {WHAT_TO_DO}"
        )


def is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return tensor.is_leaf and (tensor.requires_grad or tensor.grad is not None)


def leaves_of(inventory: Inventory) -> list[int]:
    """The slots that may have gradients."""
    parameters = set(inventory.parameters())
    return [i for i, t in enumerate(inventory.tensors) if i in parameters or is_leaf(t)]


def _is_asked(slot: Slot, tensor: Tensor) -> bool:
    """Whether Python code may ask of a slot: a counter, or a hyper-parameter that is a tensor."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    is_counter = slot.role is Role.BUFFER and is_integer
    return tensor.ndim == 0 and (slot.is_setting or is_counter)


def _modules(models: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for model in models:
        yield from model.modules()


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[dict[Any, Any]]:
    for optimizer in optimizers:
        yield optimizer.state
        yield from optimizer.state.values()


Bindings = list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]
Kept = list[tuple[dict[Any, Any], dict[Any, None]]]


def _check_leaks(bindings: Bindings, kept: Kept) -> None:
    """Tensors of the trace must not stay in modules and optimizers."""
    for module, attributes, _ in bindings:
        recomputed = set(names_recomputed(module))
        for name, value in vars(module).items():
            is_kept = name in recomputed or value is attributes.get(name)
            if not is_kept and _has_fakes(value):
                raise StepCaptureError(
                    f"the step keeps a tensor in the attribute {name!r} of "
                    f"{type(module).__name__}, which would be set only while the step is captured. "
                    "Register it as a buffer (register_buffer), or return it from the function."
                )
    for state, keys in kept:
        for key in state:
            if key not in keys:
                raise StepCaptureError(
                    f"the optimizer makes new state ({key!r}) in the middle of training, which "
                    "one graph cannot hold. Make all state at the first step."
                )


def _has_fakes(value: Any) -> bool:
    leaves = pytree.tree_leaves(value) if not isinstance(value, nn.Module) else []
    return any(isinstance(x, FakeTensor) for x in leaves)


def _put_back(bindings: Bindings, kept: Kept) -> None:
    for module, attributes, buffers in bindings:
        for name, value in list(vars(module).items()):
            if value is not attributes.get(name) and _has_fakes(value):
                if name in attributes:
                    vars(module)[name] = attributes[name]
                else:
                    del vars(module)[name]
        module._buffers.clear()
        module._buffers.update(buffers)
    for state, keys in kept:
        for key in [k for k in state if k not in keys]:
            del state[key]


def _drop_inputs(module: fx.GraphModule, kept: Sequence[bool]) -> None:
    places = module.graph.find_nodes(op="placeholder")
    for place, keep in zip(places, kept, strict=True):
        if not keep:
            module.graph.erase_node(place)
    module.recompile()


def _drop_dead(graph: fx.Graph) -> None:
    """Erases what nobody reads, and marks of the profiler."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and "profiler" in str(node.target) and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _toucher(recorder: "_Recorder", slot: int) -> Callable[[Tensor], None]:
    """A hook that does not keep its recorder alive: torch may keep fakes, and so their hooks."""
    reference = weakref.ref(recorder)

    def touch(_: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.touch(slot)

    return touch
