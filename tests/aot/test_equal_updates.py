"""Parameters that are alike are updated once in a trace; all of them are as in eager afterwards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.aot.step.program import optimizer_calls

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}


_SHORT = ("momentum", "AdamW", "RAdam")


class Net(nn.Module):
    """Layers that are alike; one is frozen, one is not used, and two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.other = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 4)
        self.layers[1].requires_grad_(False)
        self.layers[4].weight = self.layers[3].weight

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        result: Tensor = self.other(x)
        return result


def groups(model: Net) -> list[dict[str, Any]]:
    """Two groups of parameters with numbers of their own."""
    *most, last = (p for p in model.parameters() if p.requires_grad)
    return [{"params": most}, {"params": [last], "lr": 0.02}]


def run(make: Make, steps: int = 4, **settings: Any) -> Any:
    """Trains, with averages of the weights that are taken in the same step."""
    torch.manual_seed(0)
    model = Net().double()
    average = copy.deepcopy(model)
    optimizer = make(groups(model))

    def train(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.25)
            norm = torch.stack([p.norm() for p in model.parameters()]).sum()
        return loss.detach(), norm

    step: Any = train
    if settings:
        step = dynamo_backends.compile_step(
            train, model=[model, average], optimizer=optimizer, backend="aot_eager", **settings
        )
    results = []
    for _ in range(steps):
        results += step(torch.randn(6, 4).double(), torch.randint(0, 3, (6,)))
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    updated = [p for p in model.parameters() if p.grad is not None]
    results += [p.grad for p in updated]
    results += [x for p in updated for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    return step, [*results, *model.parameters(), *average.parameters()]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in _SHORT else pytest.mark.long) for n in OPTIMIZERS],
)
def test_parameters_that_are_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = []

    class Counting(optimizer_calls._Likes):
        def __init__(self, first: Any, rest: Any):
            super().__init__(first, rest)
            others.append(len(rest))

    monkeypatch.setattr(optimizer_calls, "_Likes", Counting)
    step, found = run(OPTIMIZERS[name], python="replay")
    _, expected = run(OPTIMIZERS[name])
    assert (step.launches, step.eager_steps) == (3, 1)
    assert set(others) == {2, 3}  # weights, and biases
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_views_of_one_memory_are_updated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_calls, "_Likes", None)  # is not called

    def train_views(settings: dict[str, Any]) -> Tensor:
        torch.manual_seed(0)
        model = nn.ParameterList(nn.Parameter(torch.zeros(0)) for _ in range(2))
        flat = torch.randn(6, dtype=torch.float64)
        model[0].data, model[1].data = flat[:4], flat[2:]
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)

        def train(x: Tensor) -> None:
            optimizer.zero_grad()
            (model[0] * x).square().sum().backward()
            model[1].square().sum().backward()
            optimizer.step()

        step: Any = train
        if settings:
            step = dynamo_backends.compile_step(
                train, model=model, optimizer=optimizer, backend="aot_eager", **settings
            )
        for _ in range(3):
            step(torch.randn(4, dtype=torch.float64))
        return flat

    found, expected = train_views({"python": "replay"}), train_views({})
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
