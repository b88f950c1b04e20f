"""Which calls round, and how: the same in every kernel, or as each kernel likes."""

import operator

import torch
from torch import fx

from dynamo_backends.graph.aliasing import is_view

aten = torch.ops.aten
prims = torch.ops.prims

CASTS = frozenset({aten._to_copy.default, prims.convert_element_type.default})

# IEEE 754 says what these are: the exact result, rounded once.
SUMS = frozenset({"add", "sub", "rsub"})
_QUOTIENTS = frozenset({"mul", "div", "sqrt", "reciprocal"})
_ROUNDED_ONCE = SUMS | _QUOTIENTS
_OF_PYTHON = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    torch.add: "add",
    torch.sub: "sub",
    torch.mul: "mul",
    torch.div: "div",
}

# These select or move numbers, and compute none.
_EXACT = frozenset((
    "abs", "alias", "amax", "amin", "cat", "ceil", "clamp", "clamp_max", "clamp_min", "clone",
    "complex", "constant_pad_nd", "contiguous", "copy", "copysign", "cummax", "cummin",
    "diag_embed", "diagonal_copy", "diagonal_scatter", "embedding", "expand_copy", "fill",
    "flip", "floor", "fmax", "fmin", "frac", "full", "full_like", "gather", "hardtanh",
    "heaviside", "im2col", "index", "index_select", "isin", "kthvalue", "lift_fresh",
    "lift_fresh_copy", "masked_fill", "masked_scatter", "max", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "maximum", "median", "min", "minimum", "mode", "nan_to_num",
    "nanmedian", "neg", "new_full", "new_ones", "new_zeros", "nextafter", "ones", "ones_like",
    "permute_copy", "pixel_shuffle", "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "relu", "repeat", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "roll", "scalar_tensor", "select_copy", "select_scatter",
    "sgn", "sign", "slice_copy", "slice_scatter", "sort", "split_with_sizes_copy",
    "squeeze_copy", "stack", "t_copy", "take", "threshold", "_to_copy", "topk", "tril", "triu",
    "trunc", "unfold_copy", "_unsafe_index", "_unsafe_masked_index", "_unsafe_view",
    "unsqueeze_copy", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "view_copy", "where", "zeros", "zeros_like",
))  # fmt: skip


def is_exact(node: fx.Node) -> bool:
    """Returns whether a call computes no number, so that no kernel can round it in another way."""
    if node.target is operator.getitem or node.target in CASTS or is_view(node):
        return True
    return _name(node) in _EXACT


def is_sum(node: fx.Node) -> bool:
    """Returns whether a call adds or subtracts two numbers."""
    return _name(node) in SUMS


def is_rounded_once(node: fx.Node) -> bool:
    """Returns whether a call's result is the exact one, rounded once, in every kernel.

    A product need not be if a sum follows: processors have an instruction for both, which rounds
    the sum alone.
    """
    return _name(node) in _ROUNDED_ONCE


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else ""
    if node.op == "call_method":
        return str(target)
    return _OF_PYTHON.get(target, "")  # type: ignore[arg-type]
