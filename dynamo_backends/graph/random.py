"""Random numbers stay torch's: drawn by torch from its own generator, before any backend block.

Results are then bit-equal to eager's, `torch.manual_seed` does what it does in eager, and blocks
stay whole, because drawing looks at shapes and not at data.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph

aten = torch.ops.aten


def dropout_mask(shape: Sequence[int], keep: float, device: torch.device) -> Tensor:
    """The mask that `aten.native_dropout` draws.

    Args:
        shape: Shape of the dropped-out tensor.
        keep: Probability of True.
        device: Where to draw it.
    """
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(keep)


def is_random(node: fx.Node) -> bool:
    """Whether a call draws from torch's generator, with the arguments that it has."""
    if node.target is dropout_mask:
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return not any(_argument(node, name) == off for name, off in _SWITCHED_OFF)


# Arguments with which a call that could draw random numbers does not.
_SWITCHED_OFF = (("dropout_p", 0.0), ("train", False), ("training", False))


def _argument(node: fx.Node, name: str) -> object:
    """A call's argument by its name in the schema; its default if it is not given."""
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[i] if i < len(node.args) else argument.default_value
    return None


def separate_random_draws(graph: Graph) -> None:
    """Rewrites calls that draw in the shape of a tensor so that they no longer depend on its data.

    Requires: static shapes. Ensures: the same draws in the same order.
    """
    for node in graph.calls:
        rule = _RULES.get(node.target)
        if rule is not None:
            with graph.module.graph.inserting_before(node):
                rule(graph.module.graph, node)
    graph.module.recompile()


def _split_dropout(graph: fx.Graph, node: fx.Node) -> None:
    x, p, train = node.args
    value = x.meta["val"]  # type: ignore[union-attr]
    if train is False or p in (0.0, 1.0) or value.numel() == 0 or not value.is_contiguous():
        return
    keep = 1.0 - p  # type: ignore[operator]
    shape = list(value.shape)
    mask = graph.call_function(dropout_mask, (shape, keep, value.device))
    mask.meta = {**node.meta, "val": node.meta["val"][1]}
    product = graph.call_function(aten.mul.Tensor, (x, mask))
    scaled = graph.call_function(aten.mul.Scalar, (product, 1.0 / keep))
    product.meta = scaled.meta = {**node.meta, "val": node.meta["val"][0]}
    for user in list(node.users):
        user.replace_all_uses_with(mask if user.args[1] == 1 else scaled)
        graph.erase_node(user)
    graph.erase_node(node)


def _like_to_shape(op: OpOverload) -> Callable[[fx.Graph, fx.Node], None]:
    def rewrite(graph: fx.Graph, node: fx.Node) -> None:
        value = node.meta["val"]
        if not value.is_contiguous():
            return
        settings = {"dtype": value.dtype, "device": value.device}
        draw = graph.call_function(op, (list(value.shape),), settings)
        draw.meta = node.meta
        node.replace_all_uses_with(draw)
        graph.erase_node(node)

    return rewrite


_RULES: dict[object, Callable[[fx.Graph, fx.Node], None]] = {
    aten.native_dropout.default: _split_dropout,
    aten.rand_like.default: _like_to_shape(aten.rand.default),
    aten.randn_like.default: _like_to_shape(aten.randn.default),
}
