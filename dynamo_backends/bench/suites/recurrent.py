"""Recurrent networks. Dynamo traces them only with `torch._dynamo.config.allow_rnn`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.bench.suites.case import ModelCase, Scale

_TAGS = frozenset({"recurrent", "rnn"})

_VARIANTS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm_2_layers_bidirectional": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm_projected": (nn.LSTM, {"proj_size": 8}),
    "gru": (nn.GRU, {}),
    "gru_2_layers_bidirectional": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "gru_no_bias_time_first": (nn.GRU, {"bias": False, "batch_first": False}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def recurrent(scale: Scale = "bench", batch: int = 4) -> list[ModelCase]:
    """Returns the suite: one module each, called with a sequence.

    Args:
        scale: "bench": 64 steps of 256 features; "test": 6 steps of 16 features.
        batch: Sequences per call.
    """
    steps, features = (64, 256) if scale == "bench" else (6, 16)
    sequence = _sequence(batch, steps, features)
    cases = [
        ModelCase(name, _module(kind, features, settings), sequence, _TAGS)
        for name, (kind, settings) in _VARIANTS.items()
    ]
    cases.append(
        ModelCase(
            "lstm_given_state",
            _module(nn.LSTM, features, {}),
            _sequence_and_state(batch, steps, features),
            _TAGS,
        )
    )
    cases.append(ModelCase("cells", lambda: _CellLoop(features), sequence, _TAGS))
    return cases


def _module(
    kind: type[nn.Module], features: int, settings: dict[str, Any]
) -> Callable[[], nn.Module]:
    return lambda: kind(features, features, **({"batch_first": True} | settings))


def _sequence(batch: int, steps: int, features: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(batch, steps, features),)


def _sequence_and_state(batch: int, steps: int, features: int) -> Callable[[], tuple[Any, ...]]:
    def example() -> tuple[Any, ...]:
        state = torch.randn(1, batch, features), torch.randn(1, batch, features)
        return torch.randn(batch, steps, features), state

    return example


class _CellLoop(nn.Module):
    """A loop over single steps, as people write it themselves."""

    def __init__(self, features: int):
        super().__init__()
        self.gru = nn.GRUCell(features, features)
        self.lstm = nn.LSTMCell(features, features)

    def forward(self, x: Tensor) -> Tensor:
        state = hidden = cell = x.new_zeros(x.shape[0], x.shape[2])
        for step in x.unbind(1):
            state = self.gru(step, state)
            hidden, cell = self.lstm(state, (hidden, cell))
        return hidden
