"""Networks in torch alone: an MLP, ResNet-18, and an encoder like BERT."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EncoderLayer(nn.Module):
    """Attention and two linear layers, each added to its input and normalized, as in BERT."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states, of shape (batch, length, width)."""
        batch, length = x.shape[:2]
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = self.attention_norm(x + self.out(attended.transpose(1, 2).reshape(x.shape)))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """An encoder like BERT: from ids of shape (batch, length) to scores of each word."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int):
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.scores = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores, of shape (batch, length, vocabulary)."""
        x = self.norm(self.words(ids) + self.positions)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.scores(x)
        return scores


class ResidualBlock(nn.Module):
    """Two convolutions from `given` to `made` channels, and what they are added to."""

    def __init__(self, given: int, made: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(made)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(made)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or given != made:
            strided = nn.Conv2d(given, made, 1, stride, bias=False)
            self.shortcut = nn.Sequential(strided, nn.BatchNorm2d(made))

    def forward(self, x: Tensor) -> Tensor:
        """Images, of shape (batch, channels, height, width)."""
        result: Tensor = self.first_norm(self.first(x)).relu()
        return (self.second_norm(self.second(result)) + self.shortcut(x)).relu()


def resnet18(width: int) -> nn.Module:
    """ResNet-18; as published with a width of 64 channels."""
    stem = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    blocks, given = [], width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            blocks.append(ResidualBlock(given, width << stage, stride))
            given = width << stage
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 1000)
    return nn.Sequential(*stem, *blocks, *end)


def mlp(width: int, layers: int) -> nn.Module:
    """Linear layers with a nonlinearity after each but the last."""
    linear = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(*(x for each in linear for x in (each, nn.GELU())))[:-1]


@dataclass(frozen=True)
class Network:
    """A network that is the same in every process, and its argument."""

    build: Callable[[], nn.Module]
    example: Callable[[], Tensor]

    def make(self) -> nn.Module:
        """The module, for inference."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().eval()

    def inputs(self, count: int) -> list[Tensor]:
        """Arguments of calls, all different."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return [self.example() for _ in range(count)]


def networks(scale: str) -> dict[str, Network]:
    """The networks by their names; of the scale "test" they are small."""
    is_small = scale == "test"
    width, layers, batch = (16, 2, 2) if is_small else (1024, 8, 16)
    channels, size = (4, 32) if is_small else (64, 224)
    bert: Any = (50, 8, 16, 2, 2) if is_small else (1000, 128, 768, 12, 6)
    return {
        "mlp": Network(lambda: mlp(width, layers), lambda: torch.randn(batch, width)),
        "resnet18": Network(lambda: resnet18(channels), lambda: torch.randn(1, 3, size, size)),
        "bert": Network(lambda: Encoder(*bert), lambda: torch.randint(bert[0], (2, bert[1]))),
    }
