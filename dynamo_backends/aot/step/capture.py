"""Runs a step function once on fake tensors and records it: forward, backward and update."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import FakeTensor, FakeTensorMode
from dynamo_backends.aot.step.hooks import carry_over
from dynamo_backends.aot.step.inventory import (
    Inventory,
    Slot,
    group_constants,
    group_numbers,
)
from dynamo_backends.aot.step.microbatches import Run
from dynamo_backends.aot.step.notes import Notes
from dynamo_backends.aot.step.optimizers import traced_settings
from dynamo_backends.aot.step.scalars import Answer, Scalars
from dynamo_backends.aot.step.substitution import Substitution, line_of
from dynamo_backends.errors import StepCaptureError
from dynamo_backends.graph.graph import Role

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
        gradients: Output and slot of each gradient that is left when the step ends.
        rebound: Output and slot of each buffer that was replaced instead of written to.
        free: Slots whose gradients at the start do not matter.
        cleared: Slots whose gradient the step takes away.
        answers: What the function was told about numbers.
        counters: Slots whose values the terms of these answers have after the numbers.
    """

    module: fx.GraphModule
    fakes: tuple[Tensor, ...]
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    results: tuple[Result, ...]
    spec: Any
    gradient_slots: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    rebound: tuple[tuple[int, int], ...]
    free: frozenset[int]
    cleared: tuple[int, ...]
    answers: tuple[Answer, ...]
    counters: tuple[int, ...]


class Strangers(Exception):
    """The step used tensors that are neither given to it nor of its models and optimizers."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__(f"{len(tensors)} tensors by closure")
        self.tensors = list(tensors)


def record(
    definition: Definition, inventory: Inventory, batch: Sequence[Any], batch_spec: Any
) -> Recording:
    """Records one call.

    Args:
        definition: What to call.
        inventory: What lives on.
        batch: The leaves of its arguments; floats become inputs like the optimizers' numbers.
        batch_spec: How they are put together: positional and keyword arguments.

    Raises:
        Strangers: Other tensors were used; record again with an inventory that has them.
        StepCaptureError: It cannot be one graph.
    """
    recorder = _Recorder(definition, inventory, batch, batch_spec)
    try:
        return recorder.record()
    except (StepCaptureError, Strangers):
        raise
    except Exception as error:
        raise StepCaptureError(
            f"the step cannot be captured as one graph: {type(error).__name__}: {error} "
            f"(at {line_of(error)}). {WHAT_TO_DO}"
        ) from error


def numbers_of(definition: Definition, batch: Sequence[Any]) -> list[float]:
    """The numbers that are inputs: of the optimizers, then of the batch."""
    numbers = [
        group[key] if index is None else group[key][index]
        for group, key, index in group_numbers(definition.optimizers)
    ]
    return numbers + [x for x in batch if isinstance(x, float)]


class _Recorder:
    def __init__(
        self,
        definition: Definition,
        inventory: Inventory,
        batch: Sequence[Any],
        batch_spec: Any,
    ):
        self._definition = definition
        self._inventory = inventory
        self._batch = batch
        self._batch_spec = batch_spec
        self._mode = FakeTensorMode()
        tensors = inventory.tensors
        self._counters = tuple(i for i, s in enumerate(inventory.slots) if _counts(s, tensors[i]))
        counted = [int(tensors[i]) for i in self._counters]
        self._scalars = Scalars(numbers_of(definition, batch), counted)
        self._substitution = Substitution(self._mode, self._scalars)
        self._run = Run(
            definition.optimizers,
            definition.models,
            definition.accumulate,
            self._substitution.optimizer_step,
        )
        self._with_gradient = [
            i for i, t in enumerate(inventory.tensors) if t.is_leaf and t.grad is not None
        ]
        self._outputs: list[Tensor] = []
        self._entry: dict[int, Tensor] = {}
        self._touched: set[int] = set()

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
        if self._substitution.strangers:
            raise Strangers(self._substitution.strangers)
        if group_constants(self._definition.optimizers) != constants:
            raise StepCaptureError(
                "the step changes a setting or a number in an optimizer's param_groups or state "
                "that is not a tensor; it would stay what it is in a graph. Keep it as a tensor, "
                "or change it (call a scheduler) outside of the step."
            )
        _drop_dead(module.graph)
        free = self._free(module)
        used = [i not in free for i in self._with_gradient]
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
            self._gradients,
            self._rebound,
            free,
            self._cleared(),
            tuple(self._scalars.answers.values()),
            self._counters,
        )

    def _inputs(self) -> tuple[list[Tensor], list[Role], list[str]]:
        with self._mode:
            numbers = torch.empty(len(self._scalars.values), dtype=torch.float64)
        tensors = self._inventory.tensors
        fakes = [numbers, *map(self._fake, tensors)]
        roles, names = [Role.HYPERPARAMETERS], ["numbers"]
        roles += [s.role for s in self._inventory.slots]
        names += [s.name for s in self._inventory.slots]
        for i in self._with_gradient:
            gradient: Any = tensors[i].grad
            fakes.append(self._fake(gradient))
            roles.append(Role.GRADIENT)
            names.append(f"{self._inventory.slots[i].name}.grad")
        for i, x in enumerate(self._batch):
            if isinstance(x, Tensor):
                fakes.append(self._fake(x))
                roles.append(Role.ACTIVATION)
                names.append(f"batch[{i}]")
        return fakes, roles, names

    def _fake(self, tensor: Tensor) -> Tensor:
        return self._mode.from_tensor(tensor, static_shapes=True)

    def _trace(self, *flat: Tensor) -> Any:
        remaining = iter(flat)
        numbers = next(remaining)
        scalars = [numbers[i] for i in range(len(self._scalars.values))]
        for i, scalar in enumerate(scalars):
            self._scalars.add(scalar, i)
        fakes = [next(remaining) for _ in self._inventory.slots]
        for real, fake in zip(self._inventory.tensors, fakes, strict=True):
            self._substitution.add(real, fake)
        for number, i in enumerate(self._counters):
            self._scalars.add_counter(fakes[i], number)
        for i in self._with_gradient:
            fakes[i].grad = self._entry[i] = next(remaining)
        for i in self._inventory.parameters():
            if fakes[i].requires_grad and fakes[i].is_leaf:
                fakes[i].register_post_accumulate_grad_hook(functools.partial(self._touch, i))
                carry_over(self._inventory.tensors[i], fakes[i])
        count = sum(1 for _ in group_numbers(self._definition.optimizers))
        given = iter(scalars[count:])
        batch = [
            next(remaining) if isinstance(x, Tensor) else next(given) if isinstance(x, float) else x
            for x in self._batch
        ]
        args, kwargs = pytree.tree_unflatten(batch, self._batch_spec)
        settings = traced_settings(self._definition.optimizers, scalars[:count])
        with settings, self._substitution, Notes():
            result = self._run(self._definition.function, args, kwargs)
        self._fakes = fakes
        self._keep(result)
        return self._outputs

    def _keep(self, result: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(result)
        slots = {id(t): i for i, t in enumerate(self._inventory.tensors)}
        results = []
        for leaf in leaves:
            term = self._scalars.number(leaf)
            if term is not None:
                results.append(Result("term", term))
            elif not isinstance(leaf, Tensor):
                results.append(Result("constant", leaf))
            elif id(leaf) in slots:
                results.append(Result("slot", slots[id(leaf)]))
            else:
                results.append(Result("output", self._output(self._substitution.fake(leaf))))
        self._results = tuple(results)
        self._gradients = tuple(
            (self._output(fake.grad), i)
            for i, fake in enumerate(self._fakes)
            if fake.is_leaf and fake.grad is not None and fake.grad is not self._entry.get(i)
        )
        self._rebound = tuple(self._rebound_buffers(slots))

    def _rebound_buffers(self, slots: dict[int, int]) -> Iterator[tuple[int, int]]:
        for module, _, buffers in self._bindings:
            for key, before in buffers.items():
                now = module._buffers.get(key)
                if now is before or before is None or not isinstance(now, FakeTensor):
                    continue
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

    def _touch(self, slot: int, _: Tensor) -> None:
        self._touched.add(slot)

    def _cleared(self) -> tuple[int, ...]:
        changed = self._touched | set(self._with_gradient) | self._cleared_first()
        return tuple(i for i in sorted(changed) if self._fakes[i].grad is None)

    def _cleared_first(self) -> set[int]:
        tensors = self._inventory.tensors
        return {i for i, t in enumerate(tensors) if id(t) in self._run.cleared}

    def _free(self, module: fx.GraphModule) -> frozenset[int]:
        """Slots whose gradients at the start do not matter."""
        places = module.graph.find_nodes(op="placeholder")[1 + len(self._inventory.slots) :]
        unused = {
            i for i, place in zip(self._with_gradient, places, strict=False) if not place.users
        }
        given = set(self._with_gradient)
        untouched = set(self._inventory.parameters()) - self._touched - given
        return frozenset(unused | untouched | self._cleared_first())


def _counts(slot: Slot, tensor: Tensor) -> bool:
    """Whether a slot is a counter: a 0-d integer buffer."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return slot.role is Role.BUFFER and tensor.ndim == 0 and is_integer


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
        for name, value in vars(module).items():
            if value is not attributes.get(name) and _has_fakes(value):
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
