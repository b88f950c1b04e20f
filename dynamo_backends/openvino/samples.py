"""Inputs for trials: floats as for other backends, integers that do not fit into 32 bits."""

from torch import Tensor, fx

from dynamo_backends.openvino import rules
from dynamo_backends.toolkit.samples import sample, spread_extremes


def extreme_sample(node: fx.Node) -> list[Tensor]:
    """One tensor per (fake) tensor that a call reads, the same ones for each call of the same kind.

    Integers include the largest and smallest of their type, so that arithmetic that is done in
    another width shows, and what is only moved must arrive whole.
    """
    values = [n.meta["val"] for n in node.all_input_nodes]
    tensors = sample(node.target, values)
    for tensor in tensors:
        if rules.loses_nan(node) and tensor.is_floating_point():
            tensor[tensor.isnan()] = 0.25
    spread_extremes(node, tensors)
    return tensors
