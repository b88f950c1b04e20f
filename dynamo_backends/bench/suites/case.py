"""Defines a model of a suite: how to build it, its inputs, what to expect of a compiler."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dynamo_backends.bench.suites.weights import randomize_weights

Scale = Literal["test", "bench"]
"""How large the models are: small enough for a test suite, or as published."""

Inputs = tuple[Any, ...] | dict[str, Any]
"""Positional or keyword arguments of a model."""


@dataclass(frozen=True)
class ModelCase:
    """One model of a suite, reproducible from its seed.

    Attributes:
        name: Unique within the suites.
        build: Makes the module; called with torch's generator seeded.
        example: Makes its arguments; called with torch's generator seeded.
        tags: "conv", "attention", "recurrent", ... What a test needs to know: "rnn" (Dynamo traces
            it only with `torch._dynamo.config.allow_rnn`), "breaks" (has graph breaks).
        seed: Seed of weights and inputs.
        enliven: Whether to replace the initial weights by ones that keep activations near unit
            size, so that a wrong result cannot hide below the tolerance.
    """

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[], Inputs]
    tags: frozenset[str] = frozenset()
    seed: int = 0
    enliven: bool = True

    def make(self) -> nn.Module:
        """Returns the model in eval mode, the same in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.build().eval()
            if self.enliven:
                randomize_weights(model, lambda: call(model, self.inputs()))
        return model

    def inputs(self) -> Inputs:
        """Arguments for the model, the same in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + 1)
            return self.example()


def call(function: Callable[..., Any], inputs: Inputs) -> Any:
    """Calls a function with positional or keyword inputs."""
    return function(**inputs) if isinstance(inputs, dict) else function(*inputs)


def image(batch: int, size: int, channels: int = 3) -> Callable[[], tuple[Tensor]]:
    """Example inputs: a batch of random images, normalised like photographs are."""
    return lambda: (torch.randn(batch, channels, size, size),)


def tokens(batch: int, length: int, vocabulary: int, **fixed: Any) -> Callable[[], dict[str, Any]]:
    """Example inputs: `input_ids` and further keyword arguments that are the same every time."""
    return lambda: {"input_ids": torch.randint(vocabulary, (batch, length)), **fixed}
