"""What the code of a page may take for granted; `<!-- given: names -->` says what it does.

Small, for each page runs on the CPU in seconds. Pages get objects of their own: see
`tests.pages.executed`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import dynamo_backends

__all__ = ["F", "dynamo_backends", "functools"]


def made(function: Callable[[], Any]) -> Callable[[], Any]:
    """What takes long to make, for the pages that are given it."""
    function.is_made = True  # type: ignore[attr-defined]
    return function


torch.manual_seed(0)
images = torch.rand(2, 3, 4, 4)
labels = torch.tensor([1, 2])
loader = [(images, labels), (images + 1, labels)]
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
criterion = nn.CrossEntropyLoss()
compiled = torch.compile(model, backend="onnxrt")

int8_model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
int8_batches = [torch.randn(32, 16) for _ in range(6)]

x = torch.rand(4, 3)
ids = torch.zeros(3, 5, dtype=torch.int64)
sizes = [(2, 4), (3, 6)]


class Encoder(nn.Module):
    """A model of ids, whose batch and length may vary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)).relu()


encoder = Encoder().eval()
compiled_encoder = torch.compile(encoder, backend="onnxrt")


def train(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@made
def generator() -> Any:
    from tests.generation.tiny import make

    return make("llama")


@made
def translator() -> Any:
    from tests.generation.tiny import make

    return make("t5")


@made
def prompt() -> Any:
    from tests.generation.tiny import prompt

    return prompt("llama", 20, multiple=32)
