"""What is known of the 64-bit integers of a call: values, or that they fit into 32 bits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.calls import tensors
from dynamo_backends.graph.constants import known_value
from dynamo_backends.graph.value_ranges import ValueRanges

aten = torch.ops.aten


@dataclass(frozen=True)
class Integers:
    """What is known about a call on 64-bit integers that all fit into 32 bits.

    Attributes:
        values: Of all inputs, if they are known.
        ranges: Else the least and the largest number of each input; None for other types.
    """

    values: tuple[Tensor, ...] = ()
    ranges: tuple[tuple[int, int] | None, ...] = ()


UNKNOWN = Integers()


def is_long(node: fx.Node) -> bool:
    """Whether a node's value, or one of them, has 64-bit integers."""
    return any(value.dtype == torch.int64 for value in tensors(node.meta.get("val")))


def known_inputs(node: fx.Node) -> Integers:
    """What is known about the inputs of a call, if its result fits into 32 bits as well."""
    if not any(map(is_long, node.all_input_nodes)):
        return UNKNOWN
    values = [known_value(n) for n in (*node.all_input_nodes, node)]
    if all(map(_is_small, values)):
        return Integers(values=tuple(v for v in values[:-1] if v is not None))
    ranges = ValueRanges()
    if not _are_within(ranges, node):
        return UNKNOWN
    return Integers(
        ranges=tuple(ranges.of(n) if is_long(n) else None for n in node.all_input_nodes)
    )


def are_narrow(node: fx.Node) -> bool:
    """Whether all 64-bit integers that a call reads and returns fit into 32 bits."""
    return known_inputs(node) != UNKNOWN or _are_within(ValueRanges(), node)


_READ_SHAPES_ALONE = frozenset(
    {
        aten.empty_like.default, aten.full_like.default, aten.new_empty.default,
        aten.new_full.default, aten.new_ones.default, aten.new_zeros.default,
        aten.ones_like.default, aten.zeros_like.default,
    }
)  # fmt: skip
"""Operators for which the values of the tensor that they read do not matter."""


def _are_within(ranges: ValueRanges, node: fx.Node) -> bool:
    read = () if node.target in _READ_SHAPES_ALONE else node.all_input_nodes
    longs = [n for n in (*read, node) if is_long(n)]
    return all(_is_within(ranges.of(n)) for n in longs)


def _is_within(found: Any) -> bool:
    """Whether a range is known, and within 32 bits."""
    return found is not None and all(isinstance(n, int) and abs(n) < 1 << 31 for n in found)


def _is_small(value: Tensor | None) -> bool:
    if value is None or value.dtype != torch.int64 or not value.numel():
        return value is not None
    bounds = torch.iinfo(torch.int32)
    return bool(value.min() >= bounds.min and value.max() <= bounds.max)
