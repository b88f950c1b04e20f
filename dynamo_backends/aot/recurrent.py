"""`nn.LSTM`, `nn.GRU` and `nn.RNN` as eager computes them, which torch's tracing does not.

torch traces a recurrent network by decompositions (`torch._decomp.decompositions._rnn_helper`):

- They never apply the dropout between layers: a compiled model would train without it. Here a call
  of several layers with dropout becomes one call per layer with the dropout in between.
- Up to torch 2.12, an LSTM's last states have a dimension of size 1 too many where oneDNN does not
  compute it (float64, or an input that needs a gradient). Here it is taken out.
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
def recurrent_as_in_eager(captured: fx.GraphModule | None = None) -> Iterator[None]:
    """Makes traced `nn.LSTM`, `nn.GRU`, `nn.RNN` compute what eager does (context manager).

    Args:
        captured: What will be traced, if it is a graph of Dynamo's: without a recurrent network in
            it, nothing has to be done.
    """
    if captured is not None and not has_network(captured):
        yield
        return
    with _AsInEager():
        yield


def has_network(captured: fx.GraphModule) -> bool:
    """Returns whether a graph of Dynamo's, or a graph that it calls, has a recurrent network."""
    modules = (m for m in captured.modules() if isinstance(m, fx.GraphModule))
    return any(
        getattr(n.target, "__name__", "") in _NETWORKS for m in modules for n in m.graph.nodes
    )


class _AsInEager(TorchFunctionMode):
    """Computes networks with dropout layer by layer, and checks the shapes of states."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in _NETWORKS:
            return func(*args, **(kwargs or {}))

        def network(*args: Any, **kwargs: Any) -> _Results:
            output, *states = func(*args, **kwargs)
            return (output, *(s.flatten(0, 1) if s.dim() == 4 else s for s in states))

        if not kwargs and len(args) == 9:
            packed = not isinstance(args[3], bool)
            layers, dropout, train = args[5:8] if packed else args[4:7]
            if train and dropout and layers > 1:
                return (_packed_layers if packed else _padded_layers)(network, *args)
        return network(*args, **(kwargs or {}))


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
    """Runs a layer on a packed sequence."""

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
