"""Positions in tensors: which arguments of a call say where it reads or writes.

Eager raises for a position that is out of range; compiled code does not look.
`graph.position_checks` checks what this table finds.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.call_arguments import get_argument

aten = torch.ops.aten

Size = int | torch.SymInt


@dataclass(frozen=True)
class IndexArgument:
    """A tensor of indices among a call's arguments, with its bound and whether it may wrap.

    Attributes:
        node: The tensor.
        size: Of what it goes along: positions are below it.
        negative: Positions below zero count from the end; else eager raises for them.
        argument: Place of the argument.
        element: Place in a list of indices; None where it is an argument itself.
        ignored: A value that stands for no position (`ignore_index`).
        sized: The tensor, and its dimension, that has the size; a dimension of None: all elements.
    """

    node: fx.Node
    size: Size
    negative: bool
    argument: int
    element: int | None = None
    ignored: int | None = None
    sized: tuple[fx.Node, int | None] | None = None

    @property
    def is_mask(self) -> bool:
        """Returns whether it is a boolean or uint8 mask, which cannot be out of range."""
        return self.node.meta["val"].dtype in (torch.bool, torch.uint8)


_Rule = Callable[[fx.Node], Iterator[IndexArgument]]


def _along(index: int, dim: int | None, negative: bool = False) -> _Rule:
    """The rule of calls with one tensor of positions.

    Args:
        index: Place of that argument.
        dim: Place of the argument that says along which dimension; None: along the first one.
        negative: See `IndexArgument`.
    """

    def rule(node: fx.Node) -> Iterator[IndexArgument]:
        source, positions = node.args[0], node.args[index]
        shape = _shape(source)
        along: Any = 0 if dim is None else node.args[dim]
        size = shape[along] if shape else 1
        sized = (source, along % len(shape)) if shape else None
        yield IndexArgument(positions, size, negative, index, sized=sized)  # type: ignore[arg-type]

    return rule


def _along_each(node: fx.Node) -> Iterator[IndexArgument]:
    shape, dim, indices = _shape(node.args[0]), 0, node.args[1]
    for element, index in enumerate(indices):  # type: ignore[arg-type]
        if index is None:
            dim += 1
            continue
        found = IndexArgument(index, shape[dim], True, 1, element, sized=(node.args[0], dim))  # type: ignore[arg-type]
        yield found
        dim += index.meta["val"].ndim if found.is_mask else 1


def _in_all(node: fx.Node) -> Iterator[IndexArgument]:
    shape = _shape(node.args[0])
    yield IndexArgument(node.args[1], math.prod(shape), True, 1, sized=(node.args[0], None))  # type: ignore[arg-type]


def _bags(node: fx.Node) -> Iterator[IndexArgument]:
    table, rows, offsets = node.args[:3]
    yield IndexArgument(rows, _shape(table)[0], False, 1, sized=(table, 0))  # type: ignore[arg-type]
    # The last offset may be the number of rows: an empty bag.
    yield IndexArgument(offsets, _shape(rows)[0] + 1, False, 2)  # type: ignore[arg-type]


def _classes(node: fx.Node) -> Iterator[IndexArgument]:
    scores, shape = node.args[0], _shape(node.args[0])
    dim = 0 if len(shape) == 1 else 1
    ignored = get_argument(node, "ignore_index")
    yield IndexArgument(node.args[1], shape[dim], False, 1, None, ignored, (scores, dim))  # type: ignore[arg-type]


def _rows_of_gradient(node: fx.Node) -> Iterator[IndexArgument]:
    yield IndexArgument(node.args[1], node.args[2], False, 1)  # type: ignore[arg-type]


RULES: dict[OpOverload, _Rule] = {
    aten.embedding.default: _along(1, None),
    aten.embedding_dense_backward.default: _rows_of_gradient,
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
    aten.index.Tensor: _along_each,
    aten.index_put.default: _along_each,
    aten._index_put_impl.default: _along_each,
    aten.take.default: _in_all,
    aten.put.default: _in_all,
    aten.index_fill.int_Scalar: _along(2, 1, negative=True),
    aten.index_fill.int_Tensor: _along(2, 1, negative=True),
    aten.nll_loss_forward.default: _classes,
    aten.nll_loss2d_forward.default: _classes,
    **{
        op: _along(2, 1)
        for op in (
            aten.gather.default, aten.index_add.default, aten.index_copy.default,
            aten.index_reduce.default, aten.index_select.default, aten.scatter.reduce,
            aten.scatter.src, aten.scatter.value, aten.scatter.value_reduce,
            aten.scatter_add.default, aten.scatter_reduce.two,
        )
    },
}  # fmt: skip
"""Where each kind of call has its positions. The `_unsafe_` operators have none that torch has not
computed within range itself."""


def find_index_arguments(node: fx.Node) -> list[IndexArgument]:
    """Returns the index tensors among a call's arguments, without boolean masks."""
    rule = RULES.get(node.target)  # type: ignore[call-overload]
    return [] if rule is None else [found for found in rule(node) if not found.is_mask]


def _shape(source: Any) -> torch.Size:
    value: Tensor = source.meta["val"]
    return value.shape
