"""Inputs for trials: floats as for other backends, integers that do not fit into 32 bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.openvino import rules
from dynamo_backends.toolkit.samples import sample

# Arguments whose values are positions or sizes; anything else may hold any number.
_POSITIONS = {"index", "indices", "offsets", "target", "repeats", "boundaries"}
_COUNTS = {"one_hot", "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"}


def extreme_sample(node: fx.Node) -> list[Tensor]:
    """One tensor per (fake) tensor that a call reads, the same ones for each call of the same kind.

    Integers include the largest and smallest of their type, so that arithmetic that is done in
    another width shows, and what is only moved must arrive whole.
    """
    values = [n.meta["val"] for n in node.all_input_nodes]
    tensors = sample(node.target, values)
    positions = _positions(node)
    for source, tensor in zip(node.all_input_nodes, tensors, strict=True):
        if rules.loses_nan(node) and tensor.is_floating_point():
            tensor[tensor.isnan()] = 0.25
        if source not in positions and _is_integer(tensor.dtype) and 0 not in tensor.stride():
            _spread_extremes(tensor)
    return tensors


def _positions(node: fx.Node) -> set[fx.Node]:
    """The tensors among a call's arguments that hold positions or sizes."""
    target: Any = node.target
    if target._schema.name.partition("::")[2] in _COUNTS:
        return set(node.all_input_nodes)
    found: set[fx.Node] = set()
    arguments = target._schema.arguments
    named = {a.name: v for a, v in zip(arguments, node.args, strict=False)} | node.kwargs
    for name, value in named.items():
        if name in _POSITIONS:
            fx.map_arg(value, found.add)
    return found


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _spread_extremes(tensor: Tensor) -> None:
    info = torch.iinfo(tensor.dtype)
    known: Sequence[int] = (info.max, info.min + 1, info.max // 3, info.min // 5 + 1)
    places = torch.linspace(0, tensor.numel() - 1, min(len(known), tensor.numel())).long()
    for place, number in zip(places.tolist(), known, strict=False):
        tensor[_index(tensor, place)] = number


def _index(tensor: Tensor, place: int) -> tuple[int, ...]:
    """The position of an element by its number in row-major order."""
    position = []
    for size in reversed(tensor.shape):
        place, at = divmod(place, size)
        position.append(at)
    return tuple(reversed(position))
