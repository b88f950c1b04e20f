"""Fused attention as one softmax(QKᵀ·scale + mask)·V program that XLA fuses, and its gradients."""

import math
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from dynamo_backends.graph.call_arguments import get_argument
from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.matmul import contract
from dynamo_backends.xla.lowering.registry import by_name, register_lowering

FEW = 16
"""On CPUs, so few queries to a head of keys share the products: XLA would copy the keys twice, once
for each group of queries and once transposed. In these products it reads them where they are."""

_MANY = 256
"""Largest number of queries in a block on CPUs."""

_SMALL = 1 << 12
"""On CPUs, XLA (jaxlib 0.10.2) computes what has fewer elements outside of YNNPACK."""


def refuse_dropout(node: fx.Node) -> str | None:
    """Returns why attention with dropout has no lowering; None if it has none."""
    if get_argument(node, "dropout_p"):
        return "attention with dropout draws random numbers"
    return None


def _debugs(node: fx.Node) -> str | None:
    if get_argument(node, "return_debug_mask"):
        return "it returns a debug mask"
    return refuse_dropout(node)


def scores_of(
    ctx: Context,
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    by_key: bool = False,
    first: int = 0,
) -> jax.Array:
    """Returns Q·Kᵀ·scale + mask in the accumulation dtype.

    A row per query (B, H, L, S), or with `by_key` one per key (B, H, S, L). The queries are those
    from number `first` on.
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
    return _masked(ctx, scores, mask, is_causal, by_key, first)


def _masked(
    ctx: Context,
    scores: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    by_key: bool = False,
    first: int = 0,
) -> jax.Array:
    """Scores (…, L, S), or with `by_key` (…, S, L), of what each query sees; -inf elsewhere."""
    visible = None
    if is_causal:
        length, size = scores.shape[-2:][::-1] if by_key else scores.shape[-2:]
        visible = first + lax.iota(jnp.int32, length)[:, None] >= lax.iota(jnp.int32, size)
    for condition in (visible, mask):
        if condition is None:
            continue
        if by_key:
            condition = _transposed(condition)
        if condition.dtype != jnp.bool_:
            scores = scores + condition.astype(scores.dtype)
        elif ctx.options.platform == "cpu":  # YNNPACK has no conditions
            most = jnp.where(condition, jnp.inf, -jnp.inf).astype(scores.dtype)
            scores = jnp.minimum(scores, most)
        else:
            scores = jnp.where(condition, scores, -jnp.inf)
    return scores


def _transposed(mask: jax.Array) -> jax.Array:
    """Returns a mask broadcastable to (…, L, S) as one for (…, S, L)."""
    return jnp.swapaxes(jnp.atleast_2d(mask), -1, -2)


def _exponentials(scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each row's exponentials of scores above a shift, their sum, and the shift.

    The last dimension of sum and shift is kept as 1. The shift is the row's maximum, so that the
    sum is at least 1; in a row that sees nothing it is finite, and all exponentials are 0. That
    comes of the maximum's initial value: a condition would be asked again for each element.
    """
    lowest = np.array(jnp.finfo(scores.dtype).min, scores.dtype)
    shift = lax.reduce(scores, lowest, lax.max, (scores.ndim - 1,))[..., None]
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
    """Computes attention without dropout.

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
        return _averages(ctx, _masked(ctx, scores, mask, is_causal), value)
    key, value = repeat_heads(query, key), repeat_heads(query, value)
    parts = []
    for first, end in _blocks(ctx, query.shape[2], key.shape[2]):
        seen = min(end, key.shape[2]) if is_causal else key.shape[2]
        some = query[:, :, first:end], key[:, :, :seen]
        part = None if mask is None else _part(mask, first, end, seen)
        scores = scores_of(ctx, *some, part, is_causal, scale, first=first)
        parts.append(_averages(ctx, scores, value[:, :, :seen]))
    if len(parts) == 1:
        return parts[0]
    results, logsumexps = zip(*parts, strict=True)
    return jnp.concatenate(results, 2), jnp.concatenate(logsumexps, 2)


def _blocks(ctx: Context, length: int, size: int) -> list[tuple[int, int]]:
    """Returns which queries are computed together: those from one number to before another.

    On CPUs YNNPACK computes all of attention in one go, whose scores stay in caches. With more
    than 256 queries it does so in one thread.
    """
    alone = ctx.options.platform != "cpu" or ctx.options.partitioned or _needs_logsumexp(ctx)
    if alone or length <= _MANY or size <= _MANY:
        return [(0, length)]
    count = max(min(-(-length // (_MANY // 2)), 4), -(-length // _MANY))  # four small ones at most
    step = -(-length // count)
    return [(first, min(first + step, length)) for first in range(0, length, step)]


def _needs_logsumexp(ctx: Context) -> bool:
    """Returns whether it is read, as by backward graphs."""
    return any(user.target is not getitem or user.args[1] == 1 for user in ctx.node.users)


def _part(mask: jax.Array, first: int, end: int, seen: int) -> jax.Array:
    """Returns a mask broadcastable to (…, L, S) for some queries and the first keys."""
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., first:end, :]
    return mask[..., :seen] if mask.ndim and mask.shape[-1] > 1 else mask


def _averages(ctx: Context, scores: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The values' averages, weighted by a softmax of scores (B, H, L, S), and its log-sum-exp."""
    weights, total, shift = _exponentials(scores)
    grouped = (*value.shape[:2], -1, value.shape[2])
    dims = (((3,), (2,)), ((0, 1), (0, 1)))
    out = contract(ctx, weights.astype(value.dtype).reshape(grouped), value, dims)
    out = out.reshape(*scores.shape[:3], value.shape[3])
    logsumexp = (jnp.log(total) + shift)[..., 0]
    # The result has fewer elements than the weights; dividing these takes a pass over all of them.
    if ctx.options.platform == "cpu" and total.size < _SMALL:
        # The same again, as the total is at least 1 where the result is not 0: but XLA would have
        # its reciprocal computed by itself, for which it takes the two products apart.
        total = jnp.maximum(total, jnp.minimum(out, 1))
    return out / jnp.maximum(total, 1), logsumexp


@register_lowering(
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


@register_lowering(
    "_scaled_dot_product_cudnn_attention_backward.default",
    "_scaled_dot_product_efficient_attention_backward.default",
    "_scaled_dot_product_flash_attention_backward.default",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    when=refuse_dropout,
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
