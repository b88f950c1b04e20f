"""Small models and batches for the tests of whole steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def convnet() -> nn.Module:
    """Convolution, batch norm in training mode, and dropout."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
    )


class Tied(nn.Module):
    """A language model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens))[0])


def rows(count: int, batch: int = 6) -> list[Any]:
    """Batches of rows with classes."""
    torch.manual_seed(3)
    return [(torch.randn(batch, 4), torch.randint(3, (batch,))) for _ in range(count)]


def images(count: int) -> list[Any]:
    """Batches of images with classes."""
    torch.manual_seed(4)
    return [(torch.randn(5, 2, 6, 6), torch.randint(3, (5,))) for _ in range(count)]


def sentences(count: int) -> list[Any]:
    """Batches of tokens with the tokens that follow."""
    torch.manual_seed(5)
    return [(torch.randint(11, (3, 5)), torch.randint(11, (3, 5))) for _ in range(count)]


def entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Cross entropy of the last dimension."""
    inputs, classes = batch
    scores = model(inputs)
    return F.cross_entropy(scores.flatten(0, -2), classes.flatten())
