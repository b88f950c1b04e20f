"""Decomposes the operators of torch's transformer modules in evaluation mode.

`torch.nn.TransformerEncoderLayer` and `torch.nn.MultiheadAttention` call one operator each where no
gradients are needed. torch has no rules for them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_QUERIES_AND_KEYS = 0  # kinds of masks: see `_masked`
_KEYS = 1


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decomposes `aten._native_multi_head_attention`, for inference on a CPU.

    Args:
        query: `[batch, length, embed_dim]`.
        key: `[batch, keys, embed_dim]`.
        value: As `key`.
        embed_dim: Of all heads together.
        num_head: How many heads.
        qkv_weight: `[3 * embed_dim, embed_dim]`.
        qkv_bias: `[3 * embed_dim]`.
        proj_weight: `[embed_dim, embed_dim]`.
        proj_bias: `[embed_dim]`.
        mask: True, or not 0, where a query does not see a key; a query that sees none gets NaN.
        need_weights: There is a second result.
        average_attn_weights: It is the mean over the heads.
        mask_type: The shape of the mask: 0: `[length, keys]`, 1: `[batch, keys]`, 2: that of the
            scores.

    Returns:
        The result, `[batch, length, embed_dim]`; and the weights `[batch, heads, length, keys]`,
        or their mean `[batch, length, keys]`.
    """
    if query.is_nested or query.device.type != "cpu":
        return NotImplemented

    thirds = [slice(part * embed_dim, (part + 1) * embed_dim) for part in range(3)]
    if query is key and key is value:
        projected = F.linear(query, qkv_weight, qkv_bias)
        parts = [projected[..., third] for third in thirds]
    else:
        given = zip((query, key, value), thirds, strict=True)
        parts = [F.linear(x, qkv_weight[third], qkv_bias[third]) for x, third in given]
    q, k, v = (part.unflatten(-1, (num_head, -1)).transpose(1, 2) for part in parts)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    weights = _masked(scores, mask, mask_type).softmax(-1)
    mixed = (weights @ v).transpose(1, 2).flatten(-2)
    result = F.linear(mixed, proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.sum(1) / num_head if average_attn_weights else weights


def _masked(scores: Tensor, mask: Tensor | None, mask_type: int | None) -> Tensor:
    """Scores, minus infinity where a mask hides the key."""
    if mask is None:
        return scores
    if mask_type == _QUERIES_AND_KEYS:
        mask = mask[None, None]
    elif mask_type == _KEYS:
        mask = mask[:, None, None]
    return scores.masked_fill(mask != 0, -torch.inf)


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Decomposes `aten._transformer_encoder_layer_fwd`, for inference on a CPU.

    Args:
        src: `[batch, length, embed_dim]`.
        embed_dim: As of `multi_head_attention`, as are the arguments to `proj_bias`.
        num_heads: See there.
        qkv_weight: See there.
        qkv_bias: See there.
        proj_weight: See there.
        proj_bias: See there.
        use_gelu: The activation is GELU, else ReLU.
        norm_first: Layer norms are before attention and before the linear layers, not after them.
        eps: Of the layer norms.
        norm_weight_1: Of the one of attention, `[embed_dim]`.
        norm_bias_1: Likewise.
        norm_weight_2: Of the other one.
        norm_bias_2: Likewise.
        ffn_weight_1: `[features, embed_dim]`.
        ffn_bias_1: `[features]`.
        ffn_weight_2: `[embed_dim, features]`.
        ffn_bias_2: `[embed_dim]`.
        mask: See `multi_head_attention`.
        mask_type: See there.

    Returns:
        As `src`.
    """
    if src.is_nested or src.device.type != "cpu":
        return NotImplemented

    def first_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def last_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    x = first_norm(src) if norm_first else src
    attended, _ = multi_head_attention(
        x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias,
        mask, need_weights=False, mask_type=mask_type,
    )  # fmt: skip
    x = attended + src
    if not norm_first:
        x = first_norm(x)
    hidden = F.linear(last_norm(x) if norm_first else x, ffn_weight_1, ffn_bias_1)
    hidden = F.gelu(hidden) if use_gelu else F.relu(hidden)
    x = F.linear(hidden, ffn_weight_2, ffn_bias_2) + x
    return x if norm_first else last_norm(x)
