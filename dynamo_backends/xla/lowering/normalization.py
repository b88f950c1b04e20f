"""Softmax, and normalisation over layers, groups and batches, with their gradients.

Statistics are taken in float32 for bfloat16 and float16, in two passes. The batch norms work on
either layout and keep it.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.reduction import below, standardised, widen
from dynamo_backends.xla.lowering.registry import lowers


def _shifted(ctx: Context, x: Array, dim: int) -> Array:
    x = widen(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and ctx.out_dtype.itemsize > x.dtype.itemsize:
        x = x.astype(ctx.out_dtype)
    return below(x, jnp.max(x, dim, keepdims=True)) if x.ndim else x - x


@lowers("_softmax.default")
def softmax(ctx: Context, x: Array, dim: int, half_to_float: bool) -> Array:
    if x.size == 0:
        return x
    exp = jnp.exp(_shifted(ctx, x, dim))
    return exp / jnp.sum(exp, dim, keepdims=True) if x.ndim else exp


@lowers("_log_softmax.default")
def log_softmax(ctx: Context, x: Array, dim: int, half_to_float: bool) -> Array:
    if x.size == 0:
        return x
    shifted = _shifted(ctx, x, dim)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), dim, keepdims=True)) if x.ndim else shifted


def _sum_keepdims(x: Array, dim: int) -> Array:
    return jnp.sum(x, dim, keepdims=True) if x.ndim else x


@lowers("_softmax_backward_data.default")
def softmax_backward(grad: Array, output: Array, dim: int, input_dtype: object) -> Array:
    weighted = widen(grad) * widen(output)
    return weighted - widen(output) * _sum_keepdims(weighted, dim)


@lowers("_log_softmax_backward_data.default")
def log_softmax_backward(grad: Array, output: Array, dim: int, input_dtype: object) -> Array:
    grad = widen(grad)
    return grad - jnp.exp(widen(output)) * _sum_keepdims(grad, dim)


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        x = x * widen(weight)
    return x if bias is None else x + widen(bias)


@lowers("native_layer_norm.default")
def layer_norm(
    x: Array,
    normalized_shape: Sequence[int],
    weight: Array | None,
    bias: Array | None,
    eps: float,
) -> tuple[Array, Array, Array]:
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    normalised, mean, rstd = standardised(widen(x), over, eps)
    return _affine(normalised, weight, bias), mean, rstd


@lowers("native_layer_norm_backward.default")
def layer_norm_backward(
    grad_out: Array,
    x: Array,
    normalized_shape: Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    grad_out, x, mean, rstd = widen(grad_out), widen(x), widen(mean), widen(rstd)
    outer = tuple(range(x.ndim - len(normalized_shape)))
    inner = tuple(range(len(outer), x.ndim))
    normalised = (x - mean) * rstd
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        grad = grad_out if weight is None else grad_out * widen(weight)
        along = jnp.mean(grad * normalised, inner, keepdims=True)
        grad_x = (grad - jnp.mean(grad, inner, keepdims=True) - normalised * along) * rstd
    if output_mask[1]:
        grad_weight = jnp.sum(grad_out * normalised, outer)
    if output_mask[2]:
        grad_bias = jnp.sum(grad_out, outer)
    return grad_x, grad_weight, grad_bias


@lowers("_fused_rms_norm.default")
def rms_norm(
    x: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    if eps is None:
        eps = float(jnp.finfo(x.dtype).eps)
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    x = widen(x)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x), over, keepdims=True) + eps)
    return _affine(x * rstd, weight, None), rstd


@lowers("_fused_rms_norm_backward.default")
def rms_norm_backward(
    grad_out: Array,
    x: Array,
    normalized_shape: Sequence[int],
    rstd: Array,
    weight: Array | None,
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None]:
    grad_out, x, rstd = widen(grad_out), widen(x), widen(rstd)
    outer = tuple(range(x.ndim - len(normalized_shape)))
    inner = tuple(range(len(outer), x.ndim))
    normalised = x * rstd
    grad_x = grad_weight = None
    if output_mask[0]:
        grad = grad_out if weight is None else grad_out * widen(weight)
        along = jnp.mean(grad * normalised, inner, keepdims=True)
        grad_x = (grad - normalised * along) * rstd
    if output_mask[1] and weight is not None:
        grad_weight = jnp.sum(grad_out * normalised, outer)
    return grad_x, grad_weight
