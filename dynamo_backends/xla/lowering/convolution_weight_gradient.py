"""The gradient of a convolution with respect to its weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.lowering.convolution_dense import LAX
from dynamo_backends.xla.lowering.convolution_rules import groups_per_block
from dynamo_backends.xla.lowering.convolution_shape import (
    ConvShape,
    accumulator,
    pad_spatial,
    preferred,
    window,
)


def grad_weight(
    x: jax.Array,
    dy: jax.Array,
    kernel: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    platform: str = "cpu",
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Gradient of `convolve` with respect to its weight.

    Args:
        x: The input, ``(N, *spatial, C_in)``.
        dy: Gradient of the result, ``(N, *out_spatial, C_out)``.
        kernel: Kernel size per spatial dimension.
        stride: As given to `convolve`.
        padding: As given to `convolve`.
        dilation: As given to `convolve`.
        groups: As given to `convolve`.
        platform: XLA platform that it will run on.
        precision: Precision of XLA's dots and convolutions.

    Returns:
        ``(C_out, C_in / groups, *kernel)`` in ``x``'s dtype.
    """
    w = jax.ShapeDtypeStruct((dy.shape[-1], x.shape[-1] // groups, *kernel), x.dtype)
    shape = ConvShape.of(
        x,
        w,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        platform=platform,
        precision=precision,
    )
    if shape.is_empty:
        return jnp.zeros(w.shape, x.dtype)
    if platform != "cpu":
        return _by_transposing_lax(x, dy, shape)
    if shape.in_per_group <= 4 and groups >= 8:
        return _by_shifts(x, dy, shape)
    if groups > 1:
        return _by_blocks(x, dy, shape)
    if shape.pointwise:
        return _by_dot(x, dy, shape)
    return _by_transposing_lax(x, dy, shape)


def _by_dot(x: jax.Array, dy: jax.Array, shape: ConvShape) -> jax.Array:
    """One tap: ``dyᵀ x`` over all positions."""
    x = pad_spatial(x, shape.padding, shape.padding)
    rows = window(x, (0,) * len(shape.spatial), shape.out_spatial, shape.stride)
    rows = rows.reshape(-1, shape.in_channels)
    dy = dy.reshape(-1, shape.out_channels)
    # XLA's product along the rows of both is slow. The barrier makes the transposed copy real;
    # transposing the narrower operand is cheaper.
    if shape.out_channels <= shape.in_channels:
        left, right = lax.optimization_barrier(dy.T), rows
    else:
        left, right = lax.optimization_barrier(rows.T), dy
    product = lax.dot(
        left, right, precision=shape.precision, preferred_element_type=preferred(x.dtype)
    ).astype(x.dtype)
    if shape.out_channels > shape.in_channels:
        product = product.T
    return product.reshape(shape.out_channels, shape.in_channels, *shape.kernel)


def _by_shifts(x: jax.Array, dy: jax.Array, shape: ConvShape) -> jax.Array:
    """Tiny groups: for each tap the sum of shifted input times ``dy``, over all positions.

    A loop adds up the rows, for all taps at once: XLA's reduction over all positions would not
    use vectors, and takes ten times as long.
    """
    groups, out, dtype = shape.groups, shape.out_spatial, x.dtype
    x = pad_spatial(x.astype(accumulator(dtype)), shape.padding, shape.padding)
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
        dense = (_by_dot if shape.pointwise else _by_transposing_lax)(part, grad, inner)
        dense = dense.reshape(
            merged, shape.out_per_group, merged, shape.in_per_group, *shape.kernel
        )
        grads += [dense[i, :, i] for i in range(merged)]
    return jnp.concatenate(grads, axis=0)


def _by_transposing_lax(x: jax.Array, dy: jax.Array, shape: ConvShape) -> jax.Array:
    """XLA's own convolution, transposed by jax."""
    wide = accumulator(x.dtype) if shape.platform == "cpu" else x.dtype
    dtype, x, dy = x.dtype, x.astype(wide), dy.astype(wide)
    w = jax.ShapeDtypeStruct((shape.out_channels, shape.in_per_group, *shape.kernel), wide)
    transpose = jax.linear_transpose(lambda w: LAX(x, w, shape), w)
    return transpose(dy)[0].astype(dtype)
