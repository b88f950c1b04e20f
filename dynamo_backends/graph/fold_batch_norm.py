"""Folds batch normalisation with fixed statistics into the convolution before it."""

import functools
import operator

import torch
from torch import fx

from dynamo_backends.graph.graph import Graph, eliminate_dead_calls
from dynamo_backends.graph.properties import NORMAL_FORM, Pass, Property
from dynamo_backends.graph.shape_propagation import ShapeInference

aten = torch.ops.aten

_NORM = aten._native_batch_norm_legit_no_training.default


def fold_batch_norm(graph: Graph) -> bool:
    """Folds frozen inference batch norms into the convolutions before them, in place.

    With scale = gamma / sqrt(running_var + eps), the folded weight is w * scale along the output
    channels and the folded bias (b - running_mean) * scale + beta. These are ATen calls on weights
    alone, which a backend computes once when it binds the weights.

    Requires: normal form, static shapes. Ensures: normal form; same results up to rounding.
    """
    if not graph.weights:
        return False
    frozen = {place for place, x in zip(graph.placeholders, graph.inputs, strict=True) if x.frozen}
    folded, infer = False, ShapeInference()
    for norm in graph.calls:
        if norm.target is _NORM and _foldable(norm, frozen):
            _fold(graph.module.graph, norm, infer)
            folded = True
    if folded:
        eliminate_dead_calls(graph.module.graph)
    return folded


def _foldable(norm: fx.Node, frozen: set[fx.Node]) -> bool:
    conv = norm.args[0]
    if not isinstance(conv, fx.Node) or conv.target is not aten.convolution.default:
        return False
    if len(conv.users) != 1 or any(
        u.target is not operator.getitem or u.args[1] != 0 for u in norm.users
    ):
        return False
    if conv.meta["val"].dtype not in (torch.float32, torch.float64):
        return False
    weights = [*conv.args[1:3], *norm.args[1:5]]
    return all(w is None or w in frozen for w in weights)


def _fold(graph: fx.Graph, norm: fx.Node, infer: ShapeInference) -> None:
    conv = norm.args[0]
    assert isinstance(conv, fx.Node)
    x, weight, bias, *geometry = conv.args
    gamma, beta, mean, var = norm.args[1:5]
    eps = norm.args[6]
    transposed, groups = geometry[3], geometry[5]
    w_value = weight.meta["val"]  # type: ignore[union-attr]
    channels = mean.meta["val"].shape[0]  # type: ignore[union-attr]
    spatial = [1] * (w_value.ndim - 2)

    call = functools.partial(infer.insert_call, graph)
    with graph.inserting_before(norm):
        scale = call(aten.rsqrt.default, call(aten.add.Tensor, var, eps))
        if gamma is not None:
            scale = call(aten.mul.Tensor, scale, gamma)
        if not transposed:
            factor = call(aten.view.default, scale, [channels, 1, *spatial])
            folded = call(aten.mul.Tensor, weight, factor)
        else:  # weight is (in, out / groups, *kernel)
            per_group = channels // groups
            shape = list(w_value.shape)
            split = [groups, shape[0] // groups, *shape[1:]]
            factor = call(aten.view.default, scale, [groups, 1, per_group, *spatial])
            product = call(aten.mul.Tensor, call(aten.view.default, weight, split), factor)
            folded = call(aten.view.default, product, shape)
        shift = call(aten.neg.default, mean) if bias is None else call(aten.sub.Tensor, bias, mean)
        shift = call(aten.mul.Tensor, shift, scale)
        if beta is not None:
            shift = call(aten.add.Tensor, shift, beta)
        result = graph.call_function(aten.convolution.default, (x, folded, shift, *geometry))
        result.meta = {**conv.meta, "val": conv.meta["val"]}
    for user in list(norm.users):
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(norm)


FOLD_BATCH_NORM = Pass(
    name="fold batch norm",
    summary="conv + batch norm with frozen weights become one convolution",
    requires=NORMAL_FORM | {Property.STATIC},
    ensures=frozenset(),
    run=fold_batch_norm,
)
