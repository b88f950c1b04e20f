"""Padding with constants, reflections or copies of the border, and pixel shuffling."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Layout, register_lowering
from dynamo_backends.xla.lowering.values import (
    Value,
    scalar,
    stored_array,
    stored_axis,
    wrap_in_layout_of,
)

_Pad = Callable[[jax.Array, Sequence[tuple[int, int]]], jax.Array]


def _per_axis(x: Value, pad: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs (before, after) per stored dimension; torch lists the last dimension first."""
    pairs = [(0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        pairs[stored_axis(x, -1 - i)] = (pad[2 * i], pad[2 * i + 1])
    return pairs


@register_lowering("constant_pad_nd.default", layout=Layout.RAW)
def constant_pad_nd(self: Value, pad: Sequence[int], value: Any = 0) -> Value:
    array = stored_array(self)
    config = [(before, after, 0) for before, after in _per_axis(self, pad)]
    return wrap_in_layout_of(self, lax.pad(array, jnp.asarray(scalar(value, array.dtype)), config))


def _repeat_border(array: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Copies the first and last element outwards; a negative width crops, as torch has it."""
    for axis, (before, after) in enumerate(pairs):
        if not (before or after):
            continue
        size = array.shape[axis]
        total = size + before + after
        left = min(max(0, before), total)
        right = min(max(0, after), total)
        begin = min(max(0, -before), size)
        middle = lax.slice_in_dim(array, begin, begin + total - left - right, axis=axis)
        first = lax.slice_in_dim(array, 0, 1, axis=axis)
        last = lax.slice_in_dim(array, size - 1, size, axis=axis)
        array = lax.concatenate([first] * left + [middle] + [last] * right, axis)
    return array


def _reflect_border(array: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    for axis, (before, after) in enumerate(pairs):
        if not (before or after):
            continue
        size = array.shape[axis]
        if before < 0 or after < 0:
            low, high = max(0, -before), size - max(0, -after)
            array = lax.slice_in_dim(array, low, high, axis=axis)
            size = high - low
        left = lax.rev(lax.slice_in_dim(array, 1, 1 + max(0, before), axis=axis), (axis,))
        stop = size - 1
        right = lax.rev(lax.slice_in_dim(array, stop - max(0, after), stop, axis=axis), (axis,))
        array = lax.concatenate([left, array, right], axis)
    return array


def _register(name: str, pad: _Pad) -> None:
    """Registers a padding in one to three dimensions, and its gradient."""

    @register_lowering(*(f"{name}{n}d.default" for n in (1, 2, 3)), layout=Layout.RAW)
    def forward(self: Value, padding: Sequence[int]) -> Value:
        return wrap_in_layout_of(self, pad(stored_array(self), _per_axis(self, padding)))

    @register_lowering(*(f"{name}{n}d_backward.default" for n in (1, 2, 3)))
    def backward(grad_output: jax.Array, self: jax.Array, padding: Sequence[int]) -> jax.Array:
        wide = accumulation_dtype(grad_output.dtype)
        pairs = _per_axis(self, padding)
        shape = jax.ShapeDtypeStruct(self.shape, wide)
        transpose = jax.linear_transpose(lambda x: pad(x, pairs), shape)
        return transpose(grad_output.astype(wide))[0]


_register("reflection_pad", _reflect_border)
_register("replication_pad", _repeat_border)


@register_lowering("pixel_shuffle.default")
def pixel_shuffle(ctx: Context, self: jax.Array, upscale_factor: int) -> jax.Array:
    *batch, channels, height, width = self.shape
    r = upscale_factor
    blocks = self.reshape(*batch, channels // (r * r), r, r, height, width)
    n = len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return blocks.transpose(order).reshape(ctx.out.shape)


@register_lowering("pixel_unshuffle.default")
def pixel_unshuffle(ctx: Context, self: jax.Array, downscale_factor: int) -> jax.Array:
    *batch, channels, height, width = self.shape
    r = downscale_factor
    blocks = self.reshape(*batch, channels, height // r, r, width // r, r)
    n = len(batch)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return blocks.transpose(order).reshape(ctx.out.shape)
