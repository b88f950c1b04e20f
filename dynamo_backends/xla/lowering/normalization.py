"""Softmax, and normalisation over layers and groups, with their gradients.

Statistics are taken in float32 for bfloat16 and float16, in two passes. The batch norms work on
either layout and keep it.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.reduction import standardised, subtract_max, widen
from dynamo_backends.xla.lowering.registry import Layout, register_lowering
from dynamo_backends.xla.lowering.values import ChannelsLast, Value, channels_last


def _shifted(ctx: Context, x: Array, dim: int) -> Array:
    x = widen(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and ctx.out_dtype.itemsize > x.dtype.itemsize:
        x = x.astype(ctx.out_dtype)
    return subtract_max(x, jnp.max(x, dim, keepdims=True)) if x.ndim else x - x


@register_lowering("_softmax.default")
def softmax(ctx: Context, x: Array, dim: int, half_to_float: bool) -> Array:
    if x.size == 0:
        return x
    exp = jnp.exp(_shifted(ctx, x, dim))
    return exp / jnp.sum(exp, dim, keepdims=True) if x.ndim else exp


@register_lowering("_log_softmax.default")
def log_softmax(ctx: Context, x: Array, dim: int, half_to_float: bool) -> Array:
    if x.size == 0:
        return x
    shifted = _shifted(ctx, x, dim)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), dim, keepdims=True)) if x.ndim else shifted


def _sum_keepdims(x: Array, dim: int) -> Array:
    return jnp.sum(x, dim, keepdims=True) if x.ndim else x


@register_lowering("_softmax_backward_data.default")
def softmax_backward(grad: Array, output: Array, dim: int, input_dtype: object) -> Array:
    weighted = widen(grad) * widen(output)
    return weighted - widen(output) * _sum_keepdims(weighted, dim)


@register_lowering("_log_softmax_backward_data.default")
def log_softmax_backward(grad: Array, output: Array, dim: int, input_dtype: object) -> Array:
    grad = widen(grad)
    return grad - jnp.exp(widen(output)) * _sum_keepdims(grad, dim)


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        x = x * widen(weight)
    return x if bias is None else x + widen(bias)


@register_lowering("native_layer_norm.default")
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


@register_lowering("native_layer_norm_backward.default")
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


@register_lowering("_fused_rms_norm.default")
def rms_norm(
    x: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    if eps is None:
        eps = float(jnp.finfo(x.dtype).eps)
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    x = widen(x)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x), over, keepdims=True) + eps)
    return _affine(x * rstd, weight, None), rstd


@register_lowering("_fused_rms_norm_backward.default")
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


def _in_groups(value: Value, groups: int, last: bool) -> tuple[Array, tuple[int, ...]]:
    """(N, G, C/G, *spatial), or channels last (N, *spatial, G, C/G), and the axes of a group."""
    x = widen(channels_last(value) if last else value)  # type: ignore[arg-type]
    if last:
        x = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
        return x, (*range(1, x.ndim - 2), x.ndim - 1)
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return x, tuple(range(2, x.ndim))


def _spread_in_groups(vector: Array, x: Array, last: bool) -> Array:
    """Returns a number per channel as an array that broadcasts against grouped `x`."""
    vector = widen(vector)
    if last:
        return vector.reshape(x.shape[-2:])
    return vector.reshape(*x.shape[1:3], *(1 for _ in x.shape[3:]))


def _spread_per_group(statistic: Array, x: Array, last: bool) -> Array:
    """Returns a statistic (N, G) as an array that broadcasts against grouped `x`."""
    batch, groups = statistic.shape
    ones = (1,) * (x.ndim - 3)
    shape = (batch, *ones, groups, 1) if last else (batch, groups, 1, *ones)
    return widen(statistic).reshape(shape)


@register_lowering("native_group_norm.default", layout=Layout.RAW)
def group_norm(
    x: Value,
    weight: Array | None,
    bias: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Value, Array, Array]:
    last = isinstance(x, ChannelsLast)
    values, over = _in_groups(x, group, last)
    out, mean, rstd = standardised(values, over, eps)
    if weight is not None:
        out = out * _spread_in_groups(weight, values, last)
    if bias is not None:
        out = out + _spread_in_groups(bias, values, last)
    out = out.reshape(x.array.shape if isinstance(x, ChannelsLast) else x.shape)
    return (
        ChannelsLast(out) if last else out,
        mean.reshape(N, group),
        rstd.reshape(N, group),
    )


@register_lowering("native_group_norm_backward.default", layout=Layout.RAW)
def group_norm_backward(
    grad_out: Value,
    x: Value,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Array | None, Array | None]:
    last = isinstance(x, ChannelsLast) or isinstance(grad_out, ChannelsLast)
    grad, over = _in_groups(grad_out, group, last)
    values, _ = _in_groups(x, group, last)
    rstd = _spread_per_group(rstd, values, last)
    normalised = (values - _spread_per_group(mean, values, last)) * rstd
    grad_x = grad_weight = grad_bias = None
    batch_and_space = (0, *over[:-1]) if last else (0, *over[1:])
    if output_mask[1]:
        grad_weight = jnp.sum(grad * normalised, batch_and_space).reshape(C)
    if output_mask[2]:
        grad_bias = jnp.sum(grad, batch_and_space).reshape(C)
    if output_mask[0]:
        if weight is not None:
            grad = grad * _spread_in_groups(weight, values, last)
        along = jnp.mean(grad * normalised, over, keepdims=True)
        inner = (grad - jnp.mean(grad, over, keepdims=True) - normalised * along) * rstd
        shape = (grad.shape[0], *grad.shape[1:-2], C) if last else (N, C, *grad.shape[3:])
        inner = inner.reshape(shape)
        grad_x = ChannelsLast(inner) if last else inner
    return grad_x, grad_weight, grad_bias
