"""Whatever is another object in modules and optimizers is noticed without reading each place."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dynamo_backends.aot.step.state.inventory import ContainerSnapshot, Inventory


def trained(lr: Any = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr)
    model(torch.ones(4, 2)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _state(optimizer: Any) -> Any:
    return next(iter(optimizer.state.values()))


def _another_key(model: Any, optimizer: Any) -> None:
    state = optimizer.state.pop(model[0].weight)
    optimizer.state[nn.Parameter(torch.ones(2))] = state


def _renamed(model: Any, optimizer: Any) -> None:
    state = _state(optimizer)
    state["exp"] = state.pop("exp_avg")


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "parameter": lambda m, o: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    "buffer": lambda m, o: setattr(m[1], "running_mean", m[1].running_mean.clone()),
    "new buffer": lambda m, o: m[1].register_buffer("more", torch.ones(1)),
    "module": lambda m, o: m.append(nn.ReLU()),
    "another module": lambda m, o: m.__setitem__(0, copy.deepcopy(m[0])),
    "state": lambda m, o: _state(o).update(exp_avg=_state(o)["exp_avg"].clone()),
    "one number of state": lambda m, o: _state(o).update(step=_state(o)["step"].clone()),
    "new state": lambda m, o: _state(o).update(more=torch.ones(1)),
    "lost state": lambda m, o: o.state.clear(),
    "renamed state": _renamed,
    "state of another": _another_key,
    "loaded state": lambda m, o: o.load_state_dict(o.state_dict()),
    "group": lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "parameters of a group": lambda m, o: o.param_groups[0]["params"].reverse(),
    "a tensor for a number": lambda m, o: o.param_groups[0].update(lr=torch.tensor(0.1)),
    "a list for a tuple": lambda m, o: o.param_groups[0].update(betas=[0.9, 0.99]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_object_is_noticed(name: str) -> None:
    model, optimizer = trained()
    snapshot = ContainerSnapshot(list(model.modules()), [optimizer])
    assert snapshot.is_current()
    CHANGES[name](model, optimizer)
    assert not snapshot.is_current()


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_steps_and_numbers_change_nothing(lr: Any) -> None:
    model, optimizer = trained(lr)
    snapshot = ContainerSnapshot(list(model.modules()), [optimizer])
    for i in range(3):
        optimizer.step()
        optimizer.param_groups[0]["eps"] = 1e-8 * i
    assert snapshot.is_current()


def test_lists_are_compared_by_their_elements() -> None:
    """A list may change without being another object."""
    model, optimizer = trained()
    optimizer.param_groups[0]["betas"] = betas = [0.9, torch.tensor(0.99)]
    inventory = Inventory([model], [optimizer])
    betas[0] = 0.8
    assert inventory.is_current()
    betas[1] = torch.tensor(0.8)
    assert not inventory.is_current()
    now = Inventory([model], [optimizer])
    assert inventory.is_like(now)
    assert any(t is betas[1] for t in now.tensors)


@pytest.mark.parametrize("kind", [tuple, list])
def test_schedules_of_betas_change_nothing(kind: type) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["betas"] = kind((0.9, 0.99))
    snapshot = ContainerSnapshot(list(model.modules()), [optimizer])
    optimizer.param_groups[0]["betas"] = kind((0.8, 0.99))
    assert snapshot.is_current()
    optimizer.param_groups[0]["betas"] = kind((0.8, 0.99, 0.999))
    assert not snapshot.is_current()
