"""Optimizers while a step is captured: their state exists, and their numbers are tensors."""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.state.hyperparameters import (
    group_numbers,
    group_structure,
    replace,
    restoring_groups,
)
from dynamo_backends.interface.errors import StepCaptureError

# Their formulas for capturable=True have no `if` on a tensor, as the others have.
_BRANCHING = ("RAdam", "ASGD", "Rprop")

# One call per tensor: lists would hide what belongs together.
_ONE_BY_ONE = {"foreach": False, "fused": None}


def needs_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is traced with `capturable=True`."""
    return type(optimizer).__name__ in _BRANCHING


def create_state(optimizer: torch.optim.Optimizer) -> bool:
    """Makes the state that an optimizer has before its first step.

    Returns:
        Whether all state is there now. If not, only a first step in eager makes it.
    """
    missing = [
        p for g in optimizer.param_groups for p in g["params"]
        if p.requires_grad and not optimizer.state.get(p)
    ]  # fmt: skip
    if not missing:
        return True
    if type(optimizer) is torch.optim.SGD:
        return _create_momentum(optimizer)
    if not type(optimizer).__module__.startswith("torch.optim"):
        return False
    init_group: Any = getattr(optimizer, "_init_group", None)
    if init_group is None or isinstance(optimizer, torch.optim.LBFGS):
        return False
    with _temporary_gradients(missing):
        lists = len(inspect.signature(init_group).parameters) - 1
        for group in optimizer.param_groups:
            init_group(group, *([] for _ in range(lists)))
    return True


def _create_momentum(optimizer: torch.optim.SGD) -> bool:
    """Zeros are what the first step starts from, unless dampening tells it from later ones."""
    groups = [g for g in optimizer.param_groups if g["momentum"] != 0]
    if any(g["dampening"] != 0 for g in groups):
        return False
    for group in groups:
        for p in group["params"]:
            if p.requires_grad and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
    return True


@contextlib.contextmanager
def _temporary_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = torch.zeros_like(p)
        yield
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


@contextlib.contextmanager
def traced_settings(
    optimizers: Sequence[torch.optim.Optimizer], numbers: Sequence[Tensor]
) -> Iterator[None]:
    """Puts traced tensors in place of optimizers' numbers (context manager)."""
    places = list(group_numbers(optimizers))
    structure = list(group_structure(optimizers))
    with restoring_groups(optimizers):
        for place, number in zip(places, numbers, strict=True):
            replace(*place, number)
        for group, key, index, value in structure:
            replace(group, key, index, value)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.update({k: v for k, v in _ONE_BY_ONE.items() if k in group})
                if needs_capturable(optimizer) and "capturable" in group:
                    group["capturable"] = True
        yield


class NewStateError(StepCaptureError):
    """An optimizer makes state in a step that is traced."""


@contextlib.contextmanager
def refusing_new_state(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside a step is traced: new state is refused, and nothing of it stays.

    Raises:
        NewStateError: In eager there would be new state.
    """
    before = [(state, dict.fromkeys(state)) for state in _states(optimizers)]
    try:
        yield
        key = next((key for state, keys in before for key in state if key not in keys), None)
        if key is not None:
            raise NewStateError(
                f"the optimizer creates new state ({key!r}) after the first step, which a compiled "
                "graph does not support. Create all state in the first step, or pass "
                'fallback="split".'
            )
    finally:
        for state, keys in before:
            for key in [k for k in state if k not in keys]:
                del state[key]


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[dict[Any, Any]]:
    for optimizer in optimizers:
        yield optimizer.state
        yield from optimizer.state.values()
