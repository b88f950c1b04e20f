"""Replaces oneDNN's LSTM layer in training by operators that keep no workspace.

ATen's forward keeps a workspace for its gradient, but only in grad mode. Compiled graphs run
outside of it: the workspace is None there, and AOT Autograd refuses to save that (torch 2.11 to
2.15). A backend's forward leaves none that ATen could read either. So graphs for training call two
operators of our own, with ATen's schemas. Their workspace is always empty, and the gradient
computes its own.

Whole steps run in grad mode and keep ATen's operators, which compute the forward once. Where a
backend's programs run outside of it, or take parts of a step, they call ours too.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.custom_ops import register_op_like
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.shape_propagation import propagate_fake_tensors

_layer: Any = torch.ops.aten.mkldnn_rnn_layer.default
_backward: Any = torch.ops.aten.mkldnn_rnn_layer_backward.default


def _forward_kernel(input: Tensor, *args: Any) -> tuple[Tensor, ...]:
    output, h, c, _ = _layer(input, *args)
    return output, h, c, input.new_empty(0, dtype=torch.uint8)


def _backward_kernel(*args: Any) -> tuple[Tensor, ...]:
    operands = [x.detach() for x in args[:7]]
    reverse, mode, hidden, layers, has_biases, train, bidirectional, sizes, batch_first = args[
        13:22
    ]
    with torch.enable_grad():
        *_, workspace = _layer(
            *operands, reverse, sizes, mode, hidden, layers, has_biases, bidirectional, batch_first,
            train,
        )  # fmt: skip
    results: tuple[Tensor, ...] = _backward(*operands, *args[7:22], workspace)
    return results


LSTM_LAYER = register_op_like("lstm_layer", _layer, _forward_kernel)
LSTM_LAYER_BACKWARD = register_op_like("lstm_layer_backward", _backward, _backward_kernel)


def _layer_in_training(*args: Any) -> Any:
    return LSTM_LAYER(*args) if torch.is_grad_enabled() else NotImplemented


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    _layer: _layer_in_training,
    _backward: LSTM_LAYER_BACKWARD,
}
"""For the tracing of forward and backward."""

_OURS = {_layer: LSTM_LAYER, _backward: LSTM_LAYER_BACKWARD}


def without_lstm_workspaces(graph: Graph) -> Graph:
    """Copies a step's graph with our LSTM operators for ATen's, if it has gradients.

    Args:
        graph: With static shapes. It is returned as it is if it computes no gradients of layers.
    """
    if not any(node.target is _backward for node in graph.calls):
        return graph
    result = graph.copy()
    for node in result.calls:
        if node.target in _OURS:
            node.target = _OURS[node.target]
            for outdated in (node, *node.users):
                outdated.meta.pop("val", None)
    propagate_fake_tensors(result)
    result.module.recompile()
    return result
