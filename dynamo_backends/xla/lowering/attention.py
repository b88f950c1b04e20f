"""Fused attention operators, as one softmax(QKᵀ·scale + mask)·V program that XLA fuses."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from torch import fx

from dynamo_backends.graph.calls import argument
from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.matmul import contract
from dynamo_backends.xla.lowering.registry import by_name, lowers

FEW = 16
"""On CPUs, so few queries to a head of keys share the products: XLA would copy the keys twice, once
for each group of queries and once transposed. In these products it reads them where they are."""


def drops(node: fx.Node) -> str | None:
    """Refuses attention with dropout."""
    if argument(node, "dropout_p"):
        return "attention with dropout draws random numbers"
    return None


def _debugs(node: fx.Node) -> str | None:
    if argument(node, "return_debug_mask"):
        return "it returns a debug mask"
    return drops(node)


def scores_of(
    ctx: Context,
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    by_key: bool = False,
) -> jax.Array:
    """QKᵀ·scale + mask of (B, H, L, E) and (B, H, S, E), in the accumulation dtype.

    A row per query (B, H, L, S), or with `by_key` one per key (B, H, S, L).
    """
    dtype = accumulation_dtype(query.dtype)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    batch = tuple(range(query.ndim - 2))
    # Not the scores: XLA may compute these twice, and round a product to be subtracted from in
    # another way than one whose maximum is looked for. Queries of 16 bits would lose precision.
    scales_query = query.dtype == dtype
    if scales_query:
        query = query * dtype.type(scale)
    dims = (((query.ndim - 1,), (query.ndim - 1,)), (batch, batch))
    scores = contract(ctx, *((key, query) if by_key else (query, key)), dims)
    if not scales_query:
        scores = scores * dtype.type(scale)
    return _masked(scores, mask, is_causal, by_key)


def _masked(
    scores: jax.Array, mask: jax.Array | None, is_causal: bool, by_key: bool = False
) -> jax.Array:
    """Scores (…, L, S), or with `by_key` (…, S, L), of what each query sees; -inf elsewhere."""
    visible = None
    if is_causal:
        length, size = scores.shape[-2:][::-1] if by_key else scores.shape[-2:]
        visible = lax.iota(jnp.int32, length)[:, None] >= lax.iota(jnp.int32, size)
    for condition in (visible, mask):
        if condition is None:
            continue
        if by_key:
            condition = _transposed(condition)
        if condition.dtype == jnp.bool_:
            scores = jnp.where(condition, scores, -jnp.inf)
        else:
            scores = scores + condition.astype(scores.dtype)
    return scores


def _transposed(mask: jax.Array) -> jax.Array:
    """A mask broadcastable to (…, L, S) as one for (…, S, L)."""
    return jnp.swapaxes(jnp.atleast_2d(mask), -1, -2)


def _exponentials(scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row's exponentials of what its scores are above a shift; their sum, and the shift.

    The last dimension of sum and shift is kept as 1. The shift is the row's maximum, so that the
    sum is at least 1; in a row that sees nothing it is finite, and all exponentials are 0. That
    comes of the maximum's initial value: a condition would be asked again for each element.
    """
    lowest = jnp.finfo(scores.dtype).min
    shift = jnp.max(scores, -1, keepdims=True, initial=lowest)
    weights = jnp.exp(scores - shift)
    return weights, jnp.sum(weights, -1, keepdims=True), shift


def repeat_heads(query: jax.Array, x: jax.Array) -> jax.Array:
    """Repeats the heads of keys or values for grouped-query attention."""
    times = query.shape[1] // x.shape[1]
    return x if times == 1 else jnp.repeat(x, times, axis=1)


def attend(
    ctx: Context,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention without dropout.

    Args:
        ctx: The call.
        query: (B, H, L, E).
        key: (B, H or a divisor, S, E).
        value: (B, H or a divisor, S, Ev).
        mask: Bool (True: visible) or additive, broadcastable to (B, H, L, S).
        is_causal: Query i sees keys 0 to i.
        scale: 1/√E if None.

    Returns:
        The result (B, H, L, Ev), and the log-sum-exp of the scores (B, H, L). A query that sees
        no key gives zeros.
    """
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    if ctx.options.platform == "cpu" and rows <= FEW and key.shape[1] == value.shape[1]:
        by_group = (query.shape[0], key.shape[1], rows, query.shape[3])
        scores = scores_of(ctx, query.reshape(by_group), key, None, False, scale, by_key=True)
        scores = jnp.swapaxes(scores, 2, 3).reshape(*query.shape[:3], key.shape[2])
        scores = _masked(scores, mask, is_causal)
    else:
        key, value = repeat_heads(query, key), repeat_heads(query, value)
        scores = scores_of(ctx, query, key, mask, is_causal, scale)
    weights, total, shift = _exponentials(scores)
    grouped = (*value.shape[:2], -1, key.shape[2])
    dims = (((3,), (2,)), ((0, 1), (0, 1)))
    out = contract(ctx, weights.astype(value.dtype).reshape(grouped), value, dims)
    out = out.reshape(*query.shape[:3], value.shape[3])
    # The result has fewer elements than the weights; dividing these takes a pass over all of them.
    return out / jnp.maximum(total, 1), (jnp.log(total) + shift)[..., 0]


@lowers(
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
    when=_debugs,
)
@by_name
def fused_attention(
    ctx: Context,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    attn_bias: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Seeds, offsets and lengths among the results, which nothing reads, are 0."""
    mask = attn_bias if attn_mask is None else attn_mask
    out, logsumexp = attend(ctx, query, key, value, mask, is_causal, scale)
    rest = (jnp.zeros(x.shape) if hasattr(x, "shape") else x for x in ctx.out[2:])
    return out, _fit(logsumexp, ctx.out[1].shape), *rest


def _fit(logsumexp: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Brings (B, H, L) to the shape that an operator promises.

    CUDA's are padded (with +inf, as its kernel leaves it), with a trailing 1, or empty.
    """
    if logsumexp.shape == tuple(shape):
        return logsumexp
    if len(shape) == 4:
        return logsumexp[..., None]
    if 0 in shape:
        return jnp.zeros(shape, logsumexp.dtype)
    padding = [(0, 0), (0, 0), (0, shape[2] - logsumexp.shape[2])]
    return jnp.pad(logsumexp, padding, constant_values=jnp.inf)
