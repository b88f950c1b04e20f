"""Batch normalisation and its gradient, in either memory layout.

All of them work on (array, channel axis) pairs, so that a value which arrives channels last leaves
channels last. Statistics are float32 for bfloat16 and float16, and take two passes.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from torch import fx

from dynamo_backends.graph.call_arguments import get_argument
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.reduction import widen
from dynamo_backends.xla.lowering.registry import Layout, by_name, register_lowering
from dynamo_backends.xla.lowering.values import ChannelsLast, Value, channels_last


class ValidElements(NamedTuple):
    """Holds the mask and number of the elements that are not padding.

    Attributes:
        valid: Whether one does, to be broadcast to the values in torch's order of dimensions.
        elements: How many there are of a channel.
    """

    valid: Array
    elements: Array


class _Channels:
    """Broadcasting and reduction per channel, for values that share one layout."""

    def __init__(self, *values: Value, real: ValidElements | None = None):
        self._last = any(isinstance(v, ChannelsLast) for v in values)
        self.arrays = [widen(self._stored(v)) for v in values]
        self._shape = self.arrays[0].shape
        axis = len(self._shape) - 1 if self._last else 1
        self.others = tuple(a for a in range(len(self._shape)) if a != axis)
        self._valid = None if real is None else self._stored(real.valid)
        count: Any = math.prod(self._shape[a] for a in self.others)
        self.count = count if real is None else real.elements.astype(self.arrays[0].dtype)

    def _stored(self, value: Value) -> Array:
        return channels_last(value) if self._last else value  # type: ignore[return-value]

    def spread(self, vector: Array) -> Array:
        """Returns a vector of one number per channel, ready to broadcast."""
        shape = [1] * len(self._shape)
        shape[-1 if self._last else 1] = vector.shape[0]
        return widen(vector).reshape(shape)

    def total(self, x: Array) -> Array:
        return jnp.sum(x if self._valid is None else jnp.where(self._valid, x, 0), self.others)

    def mean(self, x: Array) -> Array:
        return jnp.mean(x, self.others) if self._valid is None else self.total(x) / self.count

    def wrap(self, x: Array) -> Value:
        return ChannelsLast(x) if self._last else x


def _statistics(channels: _Channels) -> tuple[Array, Array]:
    x = channels.arrays[0]
    mean = channels.mean(x)
    return mean, channels.mean(jnp.square(x - channels.spread(mean)))


def _normalise(
    channels: _Channels,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    bias: Array | None,
) -> Value:
    scale = widen(invstd) if weight is None else widen(invstd) * widen(weight)
    x = (channels.arrays[0] - channels.spread(mean)) * channels.spread(scale)
    return channels.wrap(x if bias is None else x + channels.spread(bias))


def _saved(ctx: Context, index: int, value: Array) -> Array:
    """Returns a statistic for the backward; outside training torch leaves it empty on the CPU."""
    shape = ctx.out[index].shape
    return value if tuple(shape) == value.shape else jnp.zeros(shape, value.dtype)


def batch_norm_training(
    x: Value,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    momentum: float,
    eps: float,
    real: ValidElements | None = None,
) -> tuple[Value, Array, Array, Array | None, Array | None]:
    """Normalises by batch statistics; returns output, mean, rstd and running statistics."""
    channels = _Channels(x, real=real)
    mean, var = _statistics(channels)
    invstd = lax.rsqrt(var + eps)
    if running_mean is not None:
        running_mean = momentum * mean + (1 - momentum) * widen(running_mean)
    if running_var is not None:
        least = max if real is None else jnp.maximum
        unbiased = var * (channels.count / least(channels.count - 1, 0.5))
        running_var = momentum * unbiased + (1 - momentum) * widen(running_var)
    out = _normalise(channels, mean, invstd, weight, bias)
    return out, mean, invstd, running_mean, running_var


def _updates_in_place(node: fx.Node) -> str | None:
    if get_argument(node, "training") and get_argument(node, "running_mean") is not None:
        return "it updates the running statistics in place"
    return None


@register_lowering(
    "_batch_norm_no_update.default",
    "_batch_norm_with_update_functional.default",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional.default",
    "_native_batch_norm_legit_no_training.default",
    layout=Layout.RAW,
)
@by_name
def batch_norm(
    ctx: Context,
    input: Value,
    weight: Array | None,
    bias: Array | None,
    momentum: float,
    eps: float,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    training: bool | None = None,
    real: ValidElements | None = None,
) -> tuple[Any, ...]:
    """They differ in which results they return: a reserve, and the running statistics."""
    if training is None:
        training = "with_update" in str(ctx.node.target)
    if training or running_mean is None or running_var is None:
        out, mean, invstd, running_mean, running_var = batch_norm_training(
            input, weight, bias, running_mean, running_var, momentum, eps, real
        )
    else:
        mean, invstd = running_mean, lax.rsqrt(widen(running_var) + eps)
        out = _normalise(_Channels(input), mean, invstd, weight, bias)
        mean, invstd = _saved(ctx, 1, mean), _saved(ctx, 2, invstd)
    reserve = (jnp.zeros(ctx.out[3].shape, jnp.uint8),) if len(ctx.out) in (4, 6) else ()
    running = (running_mean, running_var) if len(ctx.out) > 4 else ()
    return out, mean, invstd, *reserve, *running


register_lowering("native_batch_norm.default", layout=Layout.RAW, when=_updates_in_place)(
    batch_norm
)


@register_lowering(
    "native_batch_norm_backward.default", "batch_norm_backward.default", layout=Layout.RAW
)
def native_batch_norm_backward(
    grad_out: Value,
    x: Value,
    weight: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    save_mean: Array | None,
    save_invstd: Array | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Array | None = None,
) -> tuple[Value | None, Array | None, Array | None]:
    channels = _Channels(grad_out, x)
    grad, values = channels.arrays
    if train:
        mean, invstd = save_mean, save_invstd
    else:
        mean, invstd = running_mean, lax.rsqrt(widen(running_var) + eps)  # type: ignore[arg-type]
    assert mean is not None and invstd is not None
    invstd = widen(invstd)
    normalised = (values - channels.spread(mean)) * channels.spread(invstd)
    grad_bias = channels.total(grad)
    grad_weight = channels.total(grad * normalised)
    grad_x = None
    if output_mask[0]:
        if train:
            share = normalised * channels.spread(grad_weight / channels.count)
            grad = grad - channels.spread(grad_bias / channels.count) - share
        scale = invstd if weight is None else invstd * widen(weight)
        grad_x = channels.wrap(grad * channels.spread(scale))
    return (
        grad_x,
        grad_weight if output_mask[1] else None,
        grad_bias if output_mask[2] else None,
    )
