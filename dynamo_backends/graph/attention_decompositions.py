"""Decomposes attention operators; torch's own rule gives wrong gradients.

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
    """Decomposes ATen's CPU flash attention; returns the output and the logsumexp.

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
    scores = _scores(query, key, is_causal, attn_mask, scale)
    # Of queries that see no key, which only a mask brings about, the weights are 0.
    weights = scores.softmax(-1) if attn_mask is None else aten._safe_softmax.default(scores, -1)
    result = weights @ _for_heads(value.to(_wide(query)), query)
    log_sum = scores.logsumexp(-1)
    log_sum = log_sum.masked_fill(log_sum == -math.inf, 0)
    return _stored_like(result.to(query.dtype), query), log_sum


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decomposes ATen's memory-efficient attention, as NVIDIA GPUs run it.

    Args:
        query: As of `flash_attention_for_cpu`, as are the arguments that are not described here.
        key: See there.
        value: See there.
        attn_bias: Added to the scores.
        compute_log_sumexp: Whether gradients will be needed.
        dropout_p: 0.
        is_causal: See there.
        scale: See there.

    Returns:
        The result, stored with the heads beside the last dimension; the logarithm of the sum of
        each query's exponentials, for a multiple of 32 queries, or for none if it is not asked
        for; and a seed and an offset, 0, since nothing is dropped.
    """
    found = flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_bias, scale=scale
    )
    if found is NotImplemented:
        return NotImplemented
    result, log_sum = found
    if compute_log_sumexp:
        log_sum = torch.nn.functional.pad(log_sum, (0, -query.shape[2] % _QUERIES))
    else:
        log_sum = log_sum.new_zeros(*log_sum.shape[:2], 0)
    seed, offset = (log_sum.new_zeros((), dtype=torch.long) for _ in range(2))
    return result.transpose(1, 2).contiguous().transpose(1, 2), log_sum, seed, offset


_QUERIES = 32  # of efficient attention's sums, for which its backward pass reads them aligned


def _stored_like(result: Tensor, query: Tensor) -> Tensor:
    strides = query.stride()
    order = sorted(range(4), key=lambda d: -strides[d])
    if order == [0, 1, 2, 3]:
        return result.contiguous()
    return result.permute(order).contiguous().permute([order.index(d) for d in range(4)])


def flash_attention_for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decomposes the backward of ATen's CPU flash attention, for which torch has no rule.

    Args:
        grad_out: Gradient of the result.
        query: As of `flash_attention_for_cpu`, as are the arguments that refer to it.
        key: See there.
        value: See there.
        out: The result.
        logsumexp: The second one.
        dropout_p: 0.
        is_causal: See there.
        attn_mask: See there.
        scale: See there.

    Returns:
        The gradients of query, key and value, stored as eager's are: heads beside the last
        dimension.
    """
    if dropout_p:
        return NotImplemented
    wide = _wide(query)
    scores = _scores(query, key, is_causal, attn_mask, scale)
    weights = (scores - logsumexp.to(wide).unsqueeze(-1)).exp()
    grad, values = grad_out.to(wide), _for_heads(value.to(wide), query)
    inner = (grad * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ values.transpose(-1, -2) - inner) * _factor(query, scale)
    found = (
        grad_scores @ _for_heads(key.to(wide), query),
        _from_heads(grad_scores.transpose(-1, -2) @ query.to(wide), key),
        _from_heads(weights.transpose(-1, -2) @ grad, value),
    )
    grad_query, grad_key, grad_value = (
        g.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2) for g in found
    )
    return grad_query, grad_key, grad_value


def _scores(
    query: Tensor, key: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    """What the softmax of attention is taken of."""
    wide = _wide(query)
    keys = _for_heads(key.to(wide), query)
    scores = query.to(wide) @ keys.transpose(-1, -2) * _factor(query, scale)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return scores if attn_mask is None else scores + attn_mask.to(wide)


def _wide(query: Tensor) -> torch.dtype:
    return query.dtype if query.dtype == torch.float64 else torch.float32


def _factor(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.size(-1)) if scale is None else scale


def _for_heads(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each head of the queries."""
    if query.size(1) == shared.size(1):
        return shared
    return shared.repeat_interleave(query.size(1) // shared.size(1), 1)


def _from_heads(grad: Tensor, shared: Tensor) -> Tensor:
    """The gradient of keys or values, from those for each head of the queries."""
    if grad.size(1) == shared.size(1):
        return grad
    return grad.unflatten(1, (shared.size(1), -1)).sum(2)
