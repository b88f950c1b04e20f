"""What a captured step depends on besides its inputs: checked before each call of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.aot.step.capture import Definition, Recording
from dynamo_backends.aot.step.hooks import HookGuard
from dynamo_backends.aot.step.inventory import Inventory, group_constants

_SIMPLE = (bool, int, float, str, type(None))


class Guards:
    """The conditions under which a recording may be used again.

    Args:
        definition: What was captured.
        inventory: What lives on.
        recording: The recording.
    """

    def __init__(self, definition: Definition, inventory: Inventory, recording: Recording):
        tensors = inventory.tensors
        self._definition = definition
        self._parameters = inventory.parameters()
        self._requires_grad = [tensors[i].requires_grad for i in self._parameters]
        self._kinds = list(map(_kind, tensors))
        self._checked = tensors
        with_gradient = set(recording.gradient_slots)
        self._without = [
            i
            for i in self._parameters
            if tensors[i].requires_grad and i not in with_gradient and i not in recording.free
        ]
        self._with = sorted(with_gradient)
        self._answers = recording.answers
        self._counters = recording.counters
        self._asked = {i for answer in recording.answers for i in answer.term.counters()}
        self._numbers: tuple[float, ...] | None = None
        self._python = [Simple(x) for x in _namespaces(definition)]
        self._groups = group_constants(definition.optimizers)
        self._mode = _mode()
        parameters = [tensors[i] for i in self._parameters]
        self._hooks = HookGuard(definition.models, definition.optimizers, parameters)

    def why_not(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> str | None:
        """Why the recording cannot be used; None if it can.

        Args:
            tensors: One per slot.
            numbers: The numbers of this step.
        """
        if tensors is not self._checked:
            if list(map(_kind, tensors)) != self._kinds:
                return "a parameter, buffer or state has another shape, dtype or device"
            self._checked = list(tensors)
        if [tensors[i].requires_grad for i in self._parameters] != self._requires_grad:
            return "requires_grad of a parameter changed"
        if any(tensors[i].grad is not None for i in self._without):
            return "there are gradients where there were none"
        if any(tensors[i].grad is None for i in self._with):
            return "there are no gradients where there were some"
        values = self._values(tensors, numbers)
        if values != self._numbers:
            if not all(answer.holds(values) for answer in self._answers):
                return "a number that the step asks for (such as weight_decay != 0) changed"
            self._numbers = values
        if _mode() != self._mode:
            return "a mode of torch changed: gradients, autocast, or the default dtype"
        if not self._hooks.holds([tensors[i] for i in self._parameters]):
            return "a hook was registered or removed"
        for simple in self._python:
            changed = simple.changed()
            if changed:
                return changed
        if group_constants(self._definition.optimizers) != self._groups:
            return "a setting in an optimizer's param_groups changed"
        return None

    def _values(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> tuple[float, ...]:
        """The numbers, and behind them the counters that the step asked about."""
        if not self._asked:
            return numbers
        first = len(numbers)
        return (
            *numbers,
            *(
                tensors[slot].item() if i in self._asked else 0
                for i, slot in enumerate(self._counters, first)
            ),
        )


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _mode() -> tuple[Any, ...]:
    cpu = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), torch.get_default_dtype(), cpu


class Simple:
    """The Python values of a namespace that are no objects: flags, numbers, names.

    Args:
        namespace: What they are in, by name; and what to call it.
    """

    def __init__(self, namespace: tuple[str, Mapping[str, Any], Sequence[str]]):
        self._name, self._mapping, names = namespace
        self._names = [
            n for n in names if n in self._mapping and isinstance(self._mapping[n], _SIMPLE)
        ]
        self._get: Callable[[Any], Any] | None = itemgetter(*self._names) if self._names else None
        self._values = self._get(self._mapping) if self._get is not None else None

    def changed(self) -> str | None:
        """What changed, in words; None if nothing did."""
        if self._get is None:
            return None
        try:
            if self._get(self._mapping) == self._values:
                return None
        except KeyError:
            pass
        return f"a Python value of {self._name} changed ({', '.join(self._names)})"


def _namespaces(
    definition: Definition,
) -> Iterator[tuple[str, Mapping[str, Any], Sequence[str]]]:
    for model in definition.models:
        for path, module in model.named_modules():
            yield _described(path, module), vars(module), list(vars(module))
    function: Any = definition.function
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        yield "the function's module", function.__globals__, function.__code__.co_names
        yield "the function's closure", _Cells(function), function.__code__.co_freevars


def _described(path: str, module: nn.Module) -> str:
    return f"{type(module).__name__} {path}".rstrip()


class _Cells(Mapping[str, Any]):
    """A function's closure as a mapping."""

    def __init__(self, function: FunctionType):
        self._cells = dict(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        )

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # not assigned yet
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)
