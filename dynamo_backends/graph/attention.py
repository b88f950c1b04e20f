"""Taking attention apart. torch's own rule for it is made for export, without gradients.

It returns the weights where the logarithm of their sum belongs, from which the backward pass would
compute wrong gradients, and its result has other strides than eager's.
"""

import math

import torch
from torch import Tensor

aten = torch.ops.aten


def flash_attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`aten._scaled_dot_product_flash_attention_for_cpu` in simpler operators.

    Args:
        query: `[batch, heads, length, size]`.
        key: `[batch, heads or a divisor of it, keys, size]`.
        value: As `key`.
        dropout_p: 0.
        is_causal: Queries see no later keys.
        attn_mask: Added to the scores.
        scale: Of the scores; None: one over the square root of the size.

    Returns:
        The result, stored like `query`, and the logarithm of the sum of each query's exponentials,
        0 for queries that see no key.
    """
    if dropout_p:
        return NotImplemented
    shared = query.size(1) != key.size(1)
    result, _ = aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=shared
    )
    return _stored_like(result, query), _log_sum(query, key, is_causal, attn_mask, scale)


def _stored_like(result: Tensor, query: Tensor) -> Tensor:
    strides = query.stride()
    order = sorted(range(4), key=lambda d: -strides[d])
    if order == [0, 1, 2, 3]:
        return result.contiguous()
    return result.permute(order).contiguous().permute([order.index(d) for d in range(4)])


def _log_sum(
    query: Tensor, key: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    if query.size(1) != key.size(1):
        key = key.repeat_interleave(query.size(1) // key.size(1), 1)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * factor
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask.to(wide)
    log_sum = scores.logsumexp(-1)
    return log_sum.masked_fill(log_sum == -math.inf, 0)
