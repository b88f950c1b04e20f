"""Training steps that the tests of steps in files save and go on with."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends import Step, compile_step


class Net(nn.Module):
    """Has batch norm with buffers, dropout, a tied weight and a buffer that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Linear(4 * 6 * 6, 8)
        self.third = nn.Linear(8, 8)
        self.fourth = nn.Linear(8, 8)
        self.fourth.weight = self.third.weight
        self.register_buffer("scale", torch.full((8,), 1.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.norm(self.first(x))).flatten(1), 0.2)
        return self.fourth(F.relu(self.third(self.second(x)))) * self.scale


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3),
}


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield (
            torch.randn(4, 3, 6, 6, generator=generator),
            torch.randint(0, 8, (4,), generator=generator),
        )


class Training:
    """A model, its optimizer and its step, after two steps."""

    def __init__(
        self, backend: str, optimizer: str = "adamw", steps: int = 2, python: Any = "replay"
    ):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.step = compile_step(
            self.function, model=self.model, optimizer=self.optimizer, backend=backend,
            python=python,
        )  # fmt: skip
        for batch in batches(steps):
            self.step(*batch)

    def function(self, images: Tensor, labels: Tensor) -> Any:
        self.optimizer.zero_grad()
        scores = self.model(images)
        loss = F.cross_entropy(scores, labels)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "right": (scores.argmax(1) == labels).sum()}

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def is_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def go_on(step: Callable[..., Any], groups: Any, count: int = 5) -> list[Any]:
    """More steps, the last with another learning rate."""
    torch.manual_seed(7)
    results = []
    for i, batch in enumerate(batches(count)):
        if i == 3:
            groups[0]["lr"] = 2e-3
        results.append(copy.deepcopy(step(*batch)))
    return results


def simple(function: Callable[..., Any], backend: str = "aot_eager", **more: Any) -> Step:
    """The step of a linear layer; `function` is given the layer and its optimizer first."""
    torch.manual_seed(0)
    model = more.pop("model", None) or nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return compile_step(
        lambda *args: function(model, optimizer, *args),
        model=model, optimizer=optimizer, backend=backend, **{"python": "replay", **more},
    )  # fmt: skip


def update(model: Any, optimizer: Any, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def plain(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    return update(model, optimizer, model(x).sum())
