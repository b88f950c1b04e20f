"""Group normalisation and its gradient, in either memory layout.

Statistics are float32 for bfloat16 and float16, and take two passes.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from dynamo_backends.xla.lowering.reduction import standardised, widen
from dynamo_backends.xla.lowering.registry import Layout, lowers
from dynamo_backends.xla.lowering.values import ChannelsLast, Value, channels_last


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


@lowers("native_group_norm.default", layout=Layout.RAW)
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


@lowers("native_group_norm_backward.default", layout=Layout.RAW)
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
