"""What a captured step depends on besides its inputs: checked before each call of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends._torch_private import TensorProperties, saved_tensors_hooks
from dynamo_backends.aot.step.hooks import HookGuard
from dynamo_backends.aot.step.hyperparameters import group_constants
from dynamo_backends.aot.step.inventory import Inventory
from dynamo_backends.aot.step.loss_scaling import ScalerGuard
from dynamo_backends.aot.step.python_state.following import PythonGuard
from dynamo_backends.aot.step.python_state.places import Place, PlaceGuard
from dynamo_backends.aot.step.recording import Definition, Recording


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
        self._properties = TensorProperties(tensors)
        self._leaves = [i for i in recording.leaves if i not in recording.free]
        self._have_gradients = [tensors[i].grad is not None for i in self._leaves]
        self._with = recording.gradient_slots
        self._gradient_kinds = self._kinds_of_gradients(tensors)
        self._answers = recording.answers
        self._living = recording.living
        self._asked = {i for answer in recording.answers for i in answer.term.living()}
        self._numbers: tuple[float, ...] | None = None
        self._python = PythonGuard(recording.conditions)
        self._modules = ModuleAttributes(definition.models)
        self.changed: list[Place] = []
        self._groups = group_constants(definition.optimizers)
        self._mode = _mode()
        parameters = [tensors[i] for i in self._parameters]
        self._aliases = recording.aliases
        self._scalers = ScalerGuard(recording.scalers)
        self._hooks = HookGuard(definition.models, definition.optimizers, parameters)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that were found right last, then those of living tensors."""
        return self._numbers or ()

    def why_not(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> str | None:
        """Why the recording cannot be used; None if it can.

        Args:
            tensors: One per slot.
            numbers: The numbers of this step.
        """
        self.changed = []
        reason = self.why_not_inputs(tensors, numbers)
        if reason is not None:
            return reason
        if group_constants(self._definition.optimizers) != self._groups:
            return "a setting in an optimizer's param_groups changed"
        if _mode() != self._mode:
            return (
                "a mode of torch changed: gradients, autocast, the default dtype, or hooks for "
                "saved tensors"
            )
        if not self._hooks.holds([tensors[i] for i in self._parameters]):
            return "a hook was registered or removed"
        changed = self._modules.changed()
        if changed:
            return changed
        self.changed = self._python.changed()
        if self.changed:
            names = ", ".join(sorted({place.name for place in self.changed}))
            return f"a Python value that the step reads changed ({names})"
        return None

    def why_not_inputs(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> str | None:
        """As `why_not`, for what the program is given alone.

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
        if not self._scalers.holds():
            return "a setting of a GradScaler changed"
        return None

    def _kinds_of_gradients(self, tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
        return [_kind(tensors[i].grad) for i in self._with]

    def _values(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> tuple[float, ...]:
        """The numbers, and behind them the living tensors that the step asked about."""
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


def _mode() -> tuple[Any, ...]:
    cpu = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), torch.get_default_dtype(), cpu, saved_tensors_hooks()


class ModuleAttributes:
    """The attributes of modules that are not tensors, as far as library code reads them.

    Of a user's own module that is `training`; what user code reads is followed. An attribute that
    is added may hide a method: their number counts, too.
    """

    def __init__(self, models: Sequence[nn.Module]):
        places: list[Place] = []
        self._tables = []
        for model in models:
            for path, module in model.named_modules():
                attributes = vars(module)
                self._tables.append(attributes)
                names = list(attributes) if _has_library_code(type(module)) else ["training"]
                owner = f"{type(module).__name__} {path}".rstrip()
                places += [
                    Place(attributes, name, f"{owner}: {name}", "")
                    for name in names
                    if name not in _TABLES and not isinstance(attributes[name], Tensor)
                ]
        self._guard = PlaceGuard(places, [place.get() for place in places])
        self._counts = list(map(len, self._tables))

    def changed(self) -> str | None:
        """What changed, in words; None if nothing did."""
        if list(map(len, self._tables)) != self._counts:
            return "a module has more attributes than it had, or fewer"
        changed = self._guard.changed()
        if not changed:
            return None
        return f"an attribute of a module changed ({', '.join(p.name for p in changed)})"


_TABLES = frozenset(vars(nn.Module())) - {"training"}
"""What every module has: tensors, submodules and hooks, all compared elsewhere."""


def _has_library_code(kind: type[nn.Module]) -> bool:
    """Whether a module's class, or one that it extends, is a layer of torch's."""
    return any(
        each.__module__.startswith("torch.")
        and issubclass(each, nn.Module)
        and each is not nn.Module
        for each in kind.__mro__
    )
