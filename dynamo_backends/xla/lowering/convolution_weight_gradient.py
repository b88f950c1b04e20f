"""The gradient of a convolution with respect to its weight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.convolution_algorithms import LAX, im2col_nhwc
from dynamo_backends.xla.lowering.convolution_rules import groups_per_block
from dynamo_backends.xla.lowering.convolution_shape import (
    ConvolutionParams,
    ConvShape,
    pad_spatial,
    preferred_accumulator,
    window,
)


def grad_weight(
    x: jax.Array,
    dy: jax.Array,
    kernel: Sequence[int],
    **settings: Unpack[ConvolutionParams],
) -> jax.Array:
    """Gradient of `convolve` with respect to its weight.

    Args:
        x: The input, ``(N, *spatial, C_in)``.
        dy: Gradient of the result, ``(N, *out_spatial, C_out)``.
        kernel: Kernel size per spatial dimension.
        **settings: As given to `convolve`.

    Returns:
        ``(C_out, C_in / groups, *kernel)`` in ``x``'s dtype.
    """
    groups = settings["groups"]
    w = jax.ShapeDtypeStruct((dy.shape[-1], x.shape[-1] // groups, *kernel), x.dtype)
    shape = ConvShape.of(x, w, **settings)
    if shape.is_empty:
        return jnp.zeros(w.shape, x.dtype)
    if shape.platform != "cpu":
        return _by_transposing_lax(x, dy, shape)
    if shape.in_per_group <= 4 and groups >= 8:
        return _by_shifts(x, dy, shape)
    return _by_blocks(x, dy, shape) if groups > 1 else _dense(x, dy, shape)


def _dense(x: jax.Array, dy: jax.Array, shape: ConvShape) -> jax.Array:
    """Computes the gradient of the weight of one group, on the CPU."""
    if shape.pointwise:
        return _by_dot(x, dy, shape)
    if _column_bytes(shape) <= _LARGEST_IMAGE:
        return _by_columns(x, dy, shape)
    return _by_transposing_lax(x, dy, shape)


def _by_dot(x: jax.Array, dy: jax.Array, shape: ConvShape) -> jax.Array:
    """Returns one tap: ``dyᵀ x`` over all positions."""
    x = pad_spatial(x, shape.padding, shape.padding)
    rows = window(x, (0,) * len(shape.spatial), shape.out_spatial, shape.stride)
    product = _product(dy, rows, shape).astype(x.dtype)
    return product.reshape(shape.out_channels, shape.in_channels, *shape.kernel)


def _product(dy: jax.Array, rows: jax.Array, shape: ConvShape) -> jax.Array:
    """``dyᵀ rows`` over all positions, ``(C_out, K)``, in the accumulator's type."""
    dy, rows = dy.reshape(-1, dy.shape[-1]), rows.reshape(-1, rows.shape[-1])

    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        # XLA's product along the rows of both is slow. The barrier makes the transposed copy real.
        return lax.dot(
            lax.optimization_barrier(left.T),
            right,
            precision=shape.precision,
            preferred_element_type=preferred_accumulator(dy.dtype),
        )

    # Transposing the narrower operand is cheaper.
    return dot(dy, rows) if dy.shape[1] <= rows.shape[1] else dot(rows, dy).T


# Bytes of all taps side by side: of the images that are taken at once, which caches are to hold,
# and of the largest image that is taken so at all.
_COLUMNS = 8 << 20
_LARGEST_IMAGE = 32 << 20


def _column_bytes(shape: ConvShape) -> int:
    """Returns the bytes of one image's columns, all taps side by side."""
    row = shape.taps * shape.in_channels * jnp.dtype(shape.dtype).itemsize
    return row * math.prod(shape.out_spatial)


def _by_columns(x: jax.Array, dy: jax.Array, shape: ConvShape) -> jax.Array:
    """``dyᵀ`` times all taps side by side, some images at a time.

    XLA's own convolution takes up to three times as long, and leaves the result in an order in
    which the update of the weight reads it badly.
    """
    divisors = (d for d in range(shape.batch, 1, -1) if shape.batch % d == 0)
    images = next((d for d in divisors if d * _column_bytes(shape) <= _COLUMNS), 1)
    part = replace(shape, batch=images)

    def product(i: jax.Array | int) -> jax.Array:
        here = lax.dynamic_slice_in_dim(x, i * images, images)
        grad = lax.dynamic_slice_in_dim(dy, i * images, images)
        return _product(grad, im2col_nhwc(here, part), shape)

    parts = shape.batch // images
    if parts == 1:
        total = product(0)
    else:
        zero = jax.eval_shape(product, 0)
        zeros = jnp.zeros(zero.shape, zero.dtype)
        total = lax.fori_loop(0, parts, lambda i, total: total + product(i), zeros)
    taps_first = total.reshape(shape.out_channels, *shape.kernel, shape.in_channels)
    return jnp.moveaxis(taps_first, -1, 1).astype(x.dtype)


def _by_shifts(x: jax.Array, dy: jax.Array, shape: ConvShape) -> jax.Array:
    """Tiny groups: for each tap the sum of shifted input times ``dy``, over all positions.

    A loop adds up the rows, for all taps at once: XLA's reduction over all positions would not
    use vectors, and takes ten times as long.
    """
    groups, out, dtype = shape.groups, shape.out_spatial, x.dtype
    x = pad_spatial(x.astype(accumulation_dtype(dtype)), shape.padding, shape.padding)
    x = lax.optimization_barrier(x)
    dy = dy.astype(x.dtype).reshape(*dy.shape[:-1], groups, shape.out_per_group, 1)
    taps = list(itertools.product(*map(range, shape.kernel)))

    def row_products(row: jax.Array | int) -> list[jax.Array]:
        """``(N, *out[1:], g, O/g, I/g)`` for each tap, of one row of the first dimension."""
        grad = lax.dynamic_index_in_dim(dy, row, axis=1, keepdims=False)
        products = []
        for tap in taps:
            first, *rest = (i * d for i, d in zip(tap, shape.dilation, strict=True))
            at = row * shape.stride[0] + first
            part = lax.dynamic_index_in_dim(x, at, axis=1, keepdims=False)
            part = window(part, rest, out[1:], shape.stride[1:])
            part = part.reshape(*part.shape[:-1], groups, 1, shape.in_per_group)
            products.append(part * grad)
        return products

    def add_row(row: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        return [total + p for total, p in zip(totals, row_products(row), strict=True)]

    totals = lax.fori_loop(1, out[0], add_row, row_products(0))
    sums = [jnp.sum(total, axis=tuple(range(total.ndim - 3))) for total in totals]
    grad = jnp.stack(sums, axis=-1).astype(dtype)  # (g, O/g, I/g, taps)
    return grad.reshape(shape.out_channels, shape.in_per_group, *shape.kernel)


def _by_blocks(x: jax.Array, dy: jax.Array, shape: ConvShape) -> jax.Array:
    """Groups: dense gradients of blocks of them, of which the block diagonal counts."""
    merged = groups_per_block(shape)
    parts = shape.groups // merged
    inner = shape.one_of(parts)
    grads = []
    for part, grad in zip(jnp.split(x, parts, axis=-1), jnp.split(dy, parts, axis=-1), strict=True):
        dense = _dense(part, grad, inner).reshape(
            merged, shape.out_per_group, merged, shape.in_per_group, *shape.kernel
        )
        grads += [dense[i, :, i] for i in range(merged)]
    return jnp.concatenate(grads, axis=0)


def _by_transposing_lax(x: jax.Array, dy: jax.Array, shape: ConvShape) -> jax.Array:
    """XLA's own convolution, transposed by jax."""
    wide = accumulation_dtype(x.dtype) if shape.platform == "cpu" else x.dtype
    dtype, x, dy = x.dtype, x.astype(wide), dy.astype(wide)
    w = jax.ShapeDtypeStruct((shape.out_channels, shape.in_per_group, *shape.kernel), wide)
    transpose = jax.linear_transpose(lambda w: LAX(x, w, shape), w)
    return transpose(dy)[0].astype(dtype)
