"""Gradients of the fused attention operators, rebuilt from the saved log-sum-exp."""

import math

import jax
import jax.numpy as jnp

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.attention import drops, repeat_heads, scores_of
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.matmul import contract
from dynamo_backends.xla.lowering.registry import by_name, lowers


def attend_backward(
    ctx: Context,
    grad_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of `attend` for query, key, value and the scores before masking.

    The weights are rebuilt from the saved log-sum-exp, as in the flash attention paper
    (arXiv:2205.14135): dS = P · (dP − rowsum(dO · O)). They are rebuilt with a row per key: the
    same product as in the forward pass would be kept from there, which takes more memory than
    all else that an attention saves.
    """
    dtype = accumulation_dtype(query.dtype)
    factor = dtype.type(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    shared_key, shared_value = key, value
    key, value = repeat_heads(query, key), repeat_heads(query, value)
    batch = tuple(range(query.ndim - 2))
    row, column = query.ndim - 2, query.ndim - 1

    def product(x: jax.Array, y: jax.Array, over_x: int, over_y: int) -> jax.Array:
        return contract(ctx, x, y, (((over_x,), (over_y,)), (batch, batch)))

    scores = scores_of(ctx, query, key, mask, is_causal, scale, by_key=True)
    total = logsumexp.astype(dtype)[..., None, :]
    weights = jnp.exp(scores - jnp.maximum(total, jnp.finfo(dtype).min))
    grad_value = product(weights.astype(query.dtype), grad_out, column, row)
    grad_weights = product(value, grad_out, column, column)
    inner = jnp.sum(grad_out.astype(dtype) * out.astype(dtype), -1)
    grad_scores = weights * (grad_weights - inner[..., None, :])
    scaled = (grad_scores * factor).astype(query.dtype)
    grad_query = product(scaled, key, row, row)
    grad_key = _merge_heads(product(scaled, query, column, row), shared_key)
    grad_value = _merge_heads(grad_value, shared_value)
    return grad_query, grad_key, grad_value, jnp.swapaxes(grad_scores, -1, -2)


def _merge_heads(grad: jax.Array, shared: jax.Array) -> jax.Array:
    if grad.shape[1] == shared.shape[1]:
        return grad
    batch, heads, *rest = grad.shape
    return grad.reshape(batch, shared.shape[1], heads // shared.shape[1], *rest).sum(2)


def _saved(logsumexp: jax.Array, query: jax.Array) -> jax.Array:
    """The log-sum-exp (B, H, L) out of what a CUDA operator saved: padded, or with a last 1."""
    if logsumexp.ndim == 4:
        logsumexp = logsumexp[..., 0]
    return logsumexp[:, :, : query.shape[2]]


def _mask_gradient(grad_scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Sums the gradient of the scores over the dimensions in which the mask was broadcast."""
    shape = (1,) * (grad_scores.ndim - mask.ndim) + mask.shape
    over = [d for d, (n, m) in enumerate(zip(grad_scores.shape, shape, strict=True)) if n != m]
    return grad_scores.sum(over, keepdims=True).reshape(mask.shape)


@lowers(
    "_scaled_dot_product_cudnn_attention_backward.default",
    "_scaled_dot_product_efficient_attention_backward.default",
    "_scaled_dot_product_flash_attention_backward.default",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    when=drops,
)
@by_name
def fused_attention_backward(
    ctx: Context,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    grad_out: jax.Array | None = None,
    grad_out_: jax.Array | None = None,
    attn_mask: jax.Array | None = None,
    attn_bias: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[jax.Array | None, ...]:
    grad = grad_out_ if grad_out is None else grad_out
    assert grad is not None
    mask = attn_bias if attn_mask is None else attn_mask
    saved = _saved(logsumexp, query)
    *gradients, grad_scores = attend_backward(
        ctx, grad, query, key, value, out, saved, mask, is_causal, scale
    )
    if len(ctx.out) == len(gradients):
        return tuple(gradients)
    if mask is None or ctx.out[3] is None:
        return *gradients, None
    return *gradients, _mask_gradient(grad_scores, mask)
