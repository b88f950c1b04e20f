"""Dropout between the layers of `nn.LSTM`, `nn.GRU` and `nn.RNN`, which torch's tracing leaves out.

torch traces a recurrent network by decompositions whose dropout is never applied
(`torch._decomp.decompositions._rnn_helper`): a compiled model would train without it. Here a call
of several layers with dropout becomes one call per layer with the dropout in between, as eager
computes it, before torch's decompositions see it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

_Results = tuple[Tensor, ...]

_NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def recurrent_dropout(captured: fx.GraphModule | None = None) -> Iterator[None]:
    """While it is active, recurrent networks that are traced in this thread apply their dropout.

    Args:
        captured: What will be traced, if it is a graph of Dynamo's: without a recurrent network in
            it, nothing has to be done.
    """
    if captured is not None and not _has_network(captured):
        yield
        return
    with _RecurrentDropout():
        yield


def _has_network(captured: fx.GraphModule) -> bool:
    modules = (m for m in captured.modules() if isinstance(m, fx.GraphModule))
    return any(
        getattr(n.target, "__name__", "") in _NETWORKS for m in modules for n in m.graph.nodes
    )


class _RecurrentDropout(TorchFunctionMode):
    """Computes networks with dropout layer by layer."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _NETWORKS and not kwargs and len(args) == 9:
            packed = not isinstance(args[3], bool)
            layers, dropout, train = args[5:8] if packed else args[4:7]
            if train and dropout and layers > 1:
                return (_packed_layers if packed else _padded_layers)(func, *args)
        return func(*args, **(kwargs or {}))


def _padded_layers(
    network: Callable[..., Any],
    input: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> _Results:
    """Sequences of one length, ``(time, batch, features)`` or batch first."""

    def layer(x: Tensor, state: Any, weights: Sequence[Tensor]) -> Any:
        return network(x, state, weights, has_biases, 1, 0.0, train, bidirectional, False)

    x = input.transpose(0, 1) if batch_first else input
    x, *states = _stack(layer, x, state, weights, layers, dropout, bidirectional)
    return (x.transpose(0, 1) if batch_first else x, *states)


def _packed_layers(
    network: Callable[..., Any],
    data: Tensor,
    batch_sizes: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> _Results:
    """A packed sequence."""

    def layer(x: Tensor, state: Any, weights: Sequence[Tensor]) -> Any:
        return network(x, batch_sizes, state, weights, has_biases, 1, 0.0, train, bidirectional)

    return _stack(layer, data, state, weights, layers, dropout, bidirectional)


def _stack(
    layer: Callable[[Tensor, Any, Sequence[Tensor]], Any],
    x: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    layers: int,
    dropout: float,
    bidirectional: bool,
) -> _Results:
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // layers
    finals: list[_Results] = []
    for i in range(layers):
        rows = slice(i * directions, (i + 1) * directions)
        first = state[rows] if isinstance(state, Tensor) else tuple(s[rows] for s in state)
        x, *last = layer(x, first, weights[i * per_layer : (i + 1) * per_layer])
        finals.append(tuple(last))
        if i < layers - 1:
            x = torch.dropout(x, dropout, True)
    return (x, *(torch.cat(parts) for parts in zip(*finals, strict=True)))
