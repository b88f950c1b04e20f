"""Programs for one convolution: different ways to write it so that XLA compiles it well.

Each program is a pair. ``prepare`` depends on the weight only, so that a pass outside may compute
it once ahead of the calls; ``apply`` does the rest. Which one is used is decided by the rules in
`convolution_programs`; here is only what each one needs to be right.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.convolution_shape import (
    ConvShape,
    pad_spatial,
    preferred_accumulator,
    window,
)

Prepared = Any  # a pytree of arrays


@dataclass(frozen=True)
class ConvolutionAlgorithm:
    """Describes one algorithm for a convolution: where it applies, and how it runs.

    Attributes:
        name: Unique short name.
        applies: Whether the program is right for a shape (not whether it is fast).
        prepare: ``(w, shape) -> pytree of arrays``, depending on the weight only.
        apply: ``(x, prepared, shape) -> result``, of shape ``shape.out_shape`` and ``x``'s dtype.
    """

    name: str
    applies: Callable[[ConvShape], bool]
    prepare: Callable[[jax.Array, ConvShape], Prepared]
    apply: Callable[[jax.Array, Prepared, ConvShape], jax.Array]

    def __call__(self, x: jax.Array, w: jax.Array, shape: ConvShape) -> jax.Array:
        """Prepare and apply in one go."""
        return self.apply(x, self.prepare(w, shape), shape)


def _spatial_last_two(w: jax.Array) -> jax.Array:
    """(O, I, *kernel) -> (*kernel, I, O)."""
    return jnp.transpose(w, (*range(2, w.ndim), 1, 0))


# --- lax: XLA's own convolution -----------------------------------------------------------------


def _lax_apply(x: jax.Array, w: jax.Array, shape: ConvShape) -> jax.Array:
    spatial = "".join("DHW"[-len(shape.spatial) :]) if len(shape.spatial) <= 3 else None
    if spatial is None:
        n = len(shape.spatial)
        numbers = lax.ConvDimensionNumbers(
            (0, n + 1, *range(1, n + 1)), (n + 1, n, *range(n)), (0, n + 1, *range(1, n + 1))
        )
    else:
        numbers = lax.conv_dimension_numbers(
            x.shape, w.shape, (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
        )
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=shape.stride,
        padding=[(p, p) for p in shape.padding],
        rhs_dilation=shape.dilation,
        dimension_numbers=numbers,
        feature_group_count=shape.groups,
        precision=shape.precision,
        preferred_element_type=preferred_accumulator(x.dtype),
    ).astype(x.dtype)


LAX = ConvolutionAlgorithm("lax", lambda s: True, lambda w, s: _spatial_last_two(w), _lax_apply)


# --- dot: a kernel with one tap is a matrix product ---------------------------------------------


def _matmul(rows: jax.Array, matrix: jax.Array, shape: ConvShape) -> jax.Array:
    """(…, K) × (K, O) as one two-dimensional product, in the accumulator's type."""
    flat = lax.dot_general(
        rows.reshape(-1, rows.shape[-1]),
        matrix,
        (((1,), (0,)), ((), ())),
        precision=shape.precision,
        preferred_element_type=preferred_accumulator(rows.dtype),
    )
    return flat.reshape(*rows.shape[:-1], matrix.shape[-1])


def _dot_apply(x: jax.Array, matrix: jax.Array, shape: ConvShape) -> jax.Array:
    x = pad_spatial(x, shape.padding, shape.padding)
    rows = window(x, (0,) * len(shape.spatial), shape.out_spatial, shape.stride)
    return _matmul(rows, matrix, shape).astype(x.dtype)


DOT = ConvolutionAlgorithm(
    "dot",
    lambda s: s.pointwise and s.groups == 1,
    lambda w, s: w.reshape(w.shape[:2]).T,
    _dot_apply,
)


# --- patches: kernel == stride cuts the input into tiles, each used once --------------------------


def _patches_apply(x: jax.Array, matrix: jax.Array, shape: ConvShape) -> jax.Array:
    out, kernel = shape.out_spatial, shape.kernel
    x = window(
        x, (0,) * len(out), [o * k for o, k in zip(out, kernel, strict=True)], (1,) * len(out)
    )
    # The last axis folds into the channels for free; the others are concatenated, last first.
    x = x.reshape(*x.shape[:-2], out[-1], kernel[-1] * shape.in_channels)
    for axis in reversed(range(1, len(out))):
        x = x.reshape(*x.shape[:axis], out[axis - 1], kernel[axis - 1], *x.shape[axis + 1 :])
        rows = [lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in range(kernel[axis - 1])]
        x = jnp.concatenate(rows, axis=-1)
    return _matmul(x, matrix, shape).astype(x.dtype)


PATCHES = ConvolutionAlgorithm(
    "patches",
    lambda s: (
        s.groups == 1 and s.kernel == s.stride and not any(s.padding) and set(s.dilation) == {1}
    ),
    lambda w, s: _spatial_last_two(w).reshape(-1, s.out_channels),
    _patches_apply,
)


# --- im2col: all taps side by side in the channels, then one product ------------------------------


def _im2col_apply(x: jax.Array, matrix: jax.Array, shape: ConvShape) -> jax.Array:
    return _matmul(im2col_nhwc(x, shape), matrix, shape).astype(x.dtype)


def im2col_nhwc(x: jax.Array, shape: ConvShape) -> jax.Array:
    """im2col: ``(N, *spatial, C) -> (N, *out_spatial, taps · C)``, taps in row-major order.

    One spatial dimension after the other, the last first, which copies far fewer short runs than
    all taps at once does.
    """
    x = pad_spatial(x, shape.padding, shape.padding)
    n = len(shape.spatial)
    for axis in reversed(range(n)):
        # Without the barrier XLA merges the passes again.
        x = lax.optimization_barrier(x)
        size, step = list(x.shape[1:-1]), [1] * n
        size[axis], step[axis] = shape.out_spatial[axis], shape.stride[axis]
        taps = []
        for i in range(shape.kernel[axis]):
            offset = [0] * n
            offset[axis] = i * shape.dilation[axis]
            taps.append(window(x, offset, size, step))
        x = jnp.concatenate(taps, axis=-1) if len(taps) > 1 else taps[0]
    return x


IM2COL = ConvolutionAlgorithm(
    "im2col",
    lambda s: s.groups == 1,
    lambda w, s: _spatial_last_two(w).reshape(-1, s.out_channels),
    _im2col_apply,
)


# --- shifts: multiply-adds over shifted inputs, vectorised over the groups ------------------------


def _shifts_prepare(w: jax.Array, shape: ConvShape) -> jax.Array:
    """(O, I/g, *kernel) -> (taps, I/g, O/g, g), in the accumulator's type."""
    split = w.reshape(shape.groups, shape.out_per_group, shape.in_per_group, shape.taps)
    return split.transpose(3, 2, 1, 0).astype(accumulation_dtype(w.dtype))


def _shifts_apply(x: jax.Array, w: jax.Array, shape: ConvShape) -> jax.Array:
    groups, n = shape.groups, len(shape.spatial)
    # (I/g, N, *spatial, g): channel i of every group, so that all groups share one vector axis.
    grouped = x.reshape(*x.shape[:-1], groups, shape.in_per_group)
    planes = jnp.moveaxis(grouped, -1, 0).astype(w.dtype)
    edges = [(0, 0, 0), (0, 0, 0), *((p, p, 0) for p in shape.padding), (0, 0, 0)]
    planes = lax.pad(planes, jnp.zeros((), planes.dtype), edges)
    planes = lax.optimization_barrier(planes)  # else the padding is undone for the centre tap
    offsets = [
        tuple(i * d for i, d in zip(tap, shape.dilation, strict=True))
        for tap in itertools.product(*map(range, shape.kernel))
    ]
    outputs = []
    for o in range(shape.out_per_group):
        terms = []
        for t, offset in enumerate(offsets):
            for i in range(shape.in_per_group):
                start = (i, 0, *offset)
                size = (1, shape.batch, *shape.out_spatial)
                shifted = window(planes, start, size, (1, 1, *shape.stride), axis=0)
                terms.append(shifted.reshape(shifted.shape[1:]) * w[t, i, o])
        outputs.append(reduce(operator.add, terms))
    result = outputs[0] if len(outputs) == 1 else jnp.stack(outputs, axis=n + 2)
    return result.reshape(shape.out_shape).astype(x.dtype)


# Every multiply-add is written out, which bounds what can be compiled in reasonable time.
_MAX_TERMS = 1024

SHIFTS = ConvolutionAlgorithm(
    "shifts",
    lambda s: s.taps * s.in_per_group * s.out_per_group <= _MAX_TERMS,
    _shifts_prepare,
    _shifts_apply,
)
