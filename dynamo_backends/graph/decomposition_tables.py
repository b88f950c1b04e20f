"""Lists which composite operators are decomposed, and by which rules."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import OpOverload, all_decompositions, core_decompositions
from dynamo_backends.graph.attention_decompositions import (
    efficient_attention,
    flash_attention_for_cpu,
    flash_attention_for_cpu_backward,
)
from dynamo_backends.graph.random_draws import decompose_dropout
from dynamo_backends.graph.transformer_decompositions import encoder_layer, multi_head_attention


def frac(x: Tensor) -> Tensor:
    """Decomposes `aten.frac`; gives 0.0 for -0.0 as eager does, unlike torch's rule."""
    return x - x.trunc()


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Decomposes `aten._softmax_backward_data` in eager's order: infinities stay infinite.

    So it has NaN where eager has an infinity.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    grad, output = grad.to(wide), output.to(wide)
    inner = (grad * output).sum(dim, keepdim=True)
    return ((grad - inner) * output).to(input_dtype).contiguous()


def clamp(x: Tensor, least: float | None = None, most: float | None = None) -> Tensor:
    """Decomposes `aten.clamp` into comparisons; keeps NaN, and infinities without a bound."""
    if least is not None:
        x = torch.where((x >= least) | (x != x), x, least)
    if most is not None:
        x = torch.where((x <= most) | (x != x), x, most)
    return x


def _checked(op: OpOverload, is_inside: Callable[..., Tensor]) -> Callable[..., Any]:
    """The rule of an operator that takes fewer positions than what it is decomposed into."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        inside = is_inside(*args).all()
        torch.ops.aten._assert_async.msg(inside, f"{op}: a position is out of range")
        return _core()[op](*args, **kwargs)

    return rule


def _is_not_negative(x: Tensor, dim: int, index: Tensor, *_: Any) -> Tensor:
    return index >= 0


def _is_in_plane(x: Tensor, index: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
    return (index >= 0) & (index < math.prod(sizes))


# Rules of our own. They hold whatever a backend keeps.
_OURS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.native_dropout.default: decompose_dropout
}

# In the place of torch's rules, or where it has none.
_INSTEAD: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        flash_attention_for_cpu_backward
    ),
    torch.ops.aten._scaled_dot_product_efficient_attention.default: efficient_attention,
    torch.ops.aten._native_multi_head_attention.default: multi_head_attention,
    torch.ops.aten._transformer_encoder_layer_fwd.default: encoder_layer,
    torch.ops.aten.frac.default: frac,
    torch.ops.aten._is_all_true.default: torch.ops.aten.all.default,
    torch.ops.aten._softmax_backward_data.default: softmax_backward,
}

# Simple operators that a vendor may compute wrong, such as on integers.
_OF_COMPARISONS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.maximum.default: lambda x, y: torch.where((x > y) | (x != x), x, y),
    torch.ops.aten.minimum.default: lambda x, y: torch.where((x < y) | (x != x), x, y),
    torch.ops.aten.clamp.default: clamp,
    torch.ops.aten.clamp_min.default: clamp,
    torch.ops.aten.clamp_max.default: lambda x, most: clamp(x, None, most),
}


@functools.cache
def _core() -> dict[OpOverload, Callable[..., Any]]:
    return core_decompositions() | _INSTEAD


def decomposition_table(keep: Collection[OpOverload]) -> dict[OpOverload, Callable[..., Any]]:
    """Returns torch's core ATen decompositions and ours, without the operators to keep.

    Args:
        keep: Overloads that the backend handles itself, because that is faster or more exact.
    """
    return {op: rule for op, rule in _core().items() if op not in keep} | _OURS


def checked_decomposition_table(
    keep: Collection[OpOverload],
) -> dict[OpOverload, Callable[..., Any]]:
    """Returns `decomposition_table` with rules that also assert that indices are in range."""
    own = {op: _checked(op, rule) for op, rule in _INSIDE.items() if op not in keep}
    return decomposition_table(keep) | own


_INSIDE: dict[OpOverload, Callable[..., Tensor]] = {
    torch.ops.aten.index_add.default: _is_not_negative,
    torch.ops.aten.index_copy.default: _is_not_negative,
    torch.ops.aten.max_unpool2d.default: _is_in_plane,
    torch.ops.aten.max_unpool3d.default: _is_in_plane,
}
"""What eager requires of positions, and the rules of these operators do not."""


def nested_decomposition_table(
    keep: Collection[OpOverload], also: Collection[OpOverload]
) -> dict[OpOverload, Callable[..., Any]]:
    """Returns the table for operators that come up inside a decomposed call.

    Args:
        keep: As for `decomposition_table`.
        also: Operators that are decomposed besides (see `Backend.decomposed_operators`).
    """
    every = all_decomposition_rules()
    return decomposition_table(keep) | {op: every[op] for op in also}


def has_decomposition(op: Any) -> bool:
    """Returns whether any rule, torch's or ours, decomposes an operator."""
    return op in all_decomposition_rules()


@functools.cache
def all_decomposition_rules() -> dict[OpOverload, Callable[..., Any]]:
    """Returns the rule of every operator that can be decomposed, composite ones too."""
    return all_decompositions() | _INSTEAD | _OF_COMPARISONS
