"""Operators for which TorchScript's passes know another name.

AOT Autograd hands over `aten.convolution`; the passes that fold, convert and fuse look for
`aten::conv2d`. The same holds for linear layers, normalisations, pooling and softmax. A row turns a
call into the operator that those passes know, or says None where it has no such form.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Spelled:
    """A call under another name.

    Attributes:
        op: The operator.
        args: Its arguments, nodes of the graph among them.
        first: It has one result, which is the first of the original's several.
    """

    op: OpOverload
    args: tuple[Any, ...]
    first: bool = False


Rule = Callable[[fx.Node], Spelled | None]
_RULES: dict[OpOverload, Rule] = {}


def spelling(node: fx.Node) -> Spelled | None:
    """Returns the call as TorchScript's passes know it; None: as it is."""
    rule = _RULES.get(node.target)  # type: ignore[call-overload]
    return None if rule is None else rule(node)


def _spells(*ops: OpOverload) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return add


@_spells(aten.convolution.default)
def _convolution(node: fx.Node) -> Spelled | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    known = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
    dims = x.meta["val"].ndim - 2  # type: ignore[union-attr]
    if transposed or dims not in (1, 2, 3):
        return None
    return Spelled(known[dims - 1], (x, weight, bias, stride, padding, dilation, groups))


@_spells(aten.addmm.default)
def _linear(node: fx.Node) -> Spelled | None:
    bias, x, right = node.args
    weight = _transposed(right)
    if node.kwargs or weight is None or bias.meta["val"].ndim != 1:  # type: ignore[union-attr]
        return None
    if bias.meta["val"].shape[0] != weight.meta["val"].shape[0]:  # type: ignore[union-attr]
        return None
    return Spelled(aten.linear.default, (x, weight, bias))


@_spells(aten.mm.default)
def _linear_without_bias(node: fx.Node) -> Spelled | None:
    x, right = node.args
    weight = _transposed(right)
    return None if weight is None else Spelled(aten.linear.default, (x, weight))


def _transposed(node: Any) -> fx.Node | None:
    """Returns what a node is the matrix transpose of."""
    if node.target is aten.t.default:
        return node.args[0]
    if node.target is aten.permute.default and [d % 2 for d in node.args[1]] == [1, 0]:
        return node.args[0]
    return None


@_spells(aten.native_layer_norm.default)
def _layer_norm(node: fx.Node) -> Spelled | None:
    return Spelled(aten.layer_norm.default, node.args, first=True) if _first(node) else None


@_spells(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(node: fx.Node) -> Spelled | None:
    if not _first(node):
        return None
    *tensors, momentum, eps = node.args
    args = (*tensors, False, momentum, eps, False)
    return Spelled(aten.batch_norm.default, args, first=True)


@_spells(aten.max_pool2d_with_indices.default)
def _max_pool2d(node: fx.Node) -> Spelled | None:
    return Spelled(aten.max_pool2d.default, node.args, first=True) if _first(node) else None


@_spells(aten._softmax.default)
def _softmax(node: fx.Node) -> Spelled | None:
    return None if node.args[2] else Spelled(aten.softmax.int, node.args[:2])


@_spells(aten._log_softmax.default)
def _log_softmax(node: fx.Node) -> Spelled | None:
    return None if node.args[2] else Spelled(aten.log_softmax.int, node.args[:2])


@_spells(aten.view.default, aten._unsafe_view.default)
def _reshape(node: fx.Node) -> Spelled:
    # Passes may change strides, and a view that was possible would not be any more.
    return Spelled(aten.reshape.default, node.args)


def _first(node: fx.Node) -> bool:
    """Returns whether only the first of several results is used."""
    return all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)
