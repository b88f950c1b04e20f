"""Models with Python control flow, and recurrent networks (`torch._dynamo.config.allow_rnn`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynamo_backends.bench.suites.case import ModelCase, Scale

_BREAKS = frozenset({"breaks"})


def control_flow(scale: Scale = "bench", batch: int = 4) -> list[ModelCase]:
    """Returns the suite of models with control flow.

    Args:
        scale: "bench": 512 features; "test": 16 features.
        batch: Rows of the input.
    """
    features = 512 if scale == "bench" else 16

    def rows() -> tuple[Tensor]:
        return (torch.randn(batch, features),)

    whole = (_LoopOverLayers, _BranchOnShape, _ListsAndDicts, _EarlyReturn)
    broken = (_BranchOnValue, _LoopUntilSmall, _ReadsItem, _MixtureOfExperts, _BreaksInBetween)
    return [
        ModelCase(_name(kind), _maker(kind, features), rows, tags)
        for kinds, tags in ((whole, frozenset[str]()), (broken, _BREAKS))
        for kind in kinds
    ]


def _name(kind: type[nn.Module]) -> str:
    words = "".join("_" + c.lower() if c.isupper() else c for c in kind.__name__)
    return words.strip("_")


def _maker(kind: Any, features: int) -> Any:
    return lambda: kind(features)


class _Base(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(3))


class _LoopOverLayers(_Base):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if i % 2 else F.gelu(layer(x)) + x
        return x


class _BranchOnShape(_Base):
    def forward(self, x: Tensor) -> Tensor:
        chosen = self.layers[0] if x.shape[0] > 2 else self.layers[1]
        return chosen(x).relu()


class _ListsAndDicts(_Base):
    def forward(self, x: Tensor) -> dict[str, Any]:
        results = {f"layer_{i}": layer(x) for i, layer in enumerate(self.layers)}
        return {"sum": sum(results.values()), "all": list(results.values()), "input": x, "n": 3}


class _EarlyReturn(_Base):
    depth: int | None = 2

    def forward(self, x: Tensor) -> tuple[Tensor, None] | tuple[Tensor, Tensor]:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + 1 == self.depth:
                return x, None
        return x, x


class _BranchOnValue(_Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.sum() > 0:
            return self.layers[1](x).relu()
        return self.layers[2](x).sigmoid()


class _Step(nn.Module):
    """A frame of its own: Dynamo compiles it although the loop around it breaks the graph."""

    def __init__(self, features: int):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.linear(x)) + 0.1 * x


class _LoopUntilSmall(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.step = _Step(features)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        steps = 0
        while x.norm() > 1 and steps < 4:
            x = self.step(x)
            steps += 1
        return x, steps


class _ReadsItem(_Base):
    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        scale = max(1.0, x.abs().max().item())
        return self.layers[1](x / scale)


class _MixtureOfExperts(nn.Module):
    """Sends each row to the expert of its highest score: matrices of data-dependent heights."""

    def __init__(self, features: int):
        super().__init__()
        self.experts = nn.ModuleList(_Step(features) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :3].argmax(dim=1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == i).flatten()
            if rows.numel():
                result = result.index_copy(0, rows, expert(x[rows]))
        return result


class _BreaksInBetween(_Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).relu()
        torch._dynamo.graph_break()
        return self.layers[1](x) * 2


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
