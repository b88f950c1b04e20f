"""Unfolding images into columns of window elements, and folding them back."""

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import lowers

Pair = Sequence[int]


def _count(size: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _taps(kernel_size: Pair, dilation: Pair) -> Iterator[tuple[int, int]]:
    """Offsets of the window's elements, row by row."""
    rows, columns = kernel_size
    for i, j in itertools.product(range(rows), range(columns)):
        yield i * dilation[0], j * dilation[1]


@lowers("im2col.default")
def im2col(
    ctx: Context,
    self: jax.Array,
    kernel_size: Pair,
    dilation: Pair,
    padding: Pair,
    stride: Pair,
) -> jax.Array:
    """(N, C, H, W) to (N, C · kernel elements, windows)."""
    size = self.shape[-2:]
    counts = [
        _count(*values) for values in zip(size, kernel_size, dilation, padding, stride, strict=True)
    ]
    config = [(0, 0, 0)] * (self.ndim - 2) + [(p, p, 0) for p in padding]
    padded = lax.pad(self, self.dtype.type(0), config)
    parts = []
    for top, left in _taps(kernel_size, dilation):
        part = lax.slice_in_dim(padded, top, top + (counts[0] - 1) * stride[0] + 1, stride[0], -2)
        parts.append(
            lax.slice_in_dim(part, left, left + (counts[1] - 1) * stride[1] + 1, stride[1], -1)
        )
    return jnp.stack(parts, self.ndim - 2).reshape(ctx.out.shape)


@lowers("col2im.default")
def col2im(
    ctx: Context,
    self: jax.Array,
    output_size: Pair,
    kernel_size: Pair,
    dilation: Pair,
    padding: Pair,
    stride: Pair,
) -> jax.Array:
    """(N, C · kernel elements, windows) to (N, C, H, W), overlapping elements summed."""
    counts = [
        _count(*values)
        for values in zip(output_size, kernel_size, dilation, padding, stride, strict=True)
    ]
    wide = self.astype(accumulation_dtype(self.dtype))
    *batch, _, _ = self.shape
    taps = kernel_size[0] * kernel_size[1]
    windows = wide.reshape(*batch, ctx.out.shape[-3], taps, *counts)
    total = jnp.zeros(ctx.out.shape, wide.dtype)
    for k, offsets in enumerate(_taps(kernel_size, dilation)):
        config = [(0, 0, 0)] * (len(batch) + 1)
        for offset, size, count, p, s in zip(
            offsets, output_size, counts, padding, stride, strict=True
        ):
            low = offset - p
            config.append((low, size - low - (count - 1) * s - 1, s - 1))
        total = total + lax.pad(windows[..., k, :, :], wide.dtype.type(0), config)
    return total
