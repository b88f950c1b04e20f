"""3×3 convolutions by Winograd's minimal filtering (see `kernels/winograd_transforms.py`)."""

from __future__ import annotations

import operator
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dynamo_backends.kernels.winograd_transforms import F2, F4, Transforms
from dynamo_backends.xla.lowering.convolution_dense import ConvolutionProgram
from dynamo_backends.xla.lowering.convolution_shape import ConvShape, pad_spatial, window


def _combine(matrix: np.ndarray, parts: list[jax.Array]) -> list[jax.Array]:
    """matrix @ parts, written out as additions so that XLA fuses them."""
    rows = []
    for row in matrix:
        terms = [
            part if factor == 1 else part * jnp.asarray(factor, part.dtype)
            for factor, part in zip(row, parts, strict=True)
            if factor != 0
        ]
        rows.append(reduce(operator.add, terms))
    return rows


def _prepare(w: jax.Array, shape: ConvShape, f: Transforms) -> list[jax.Array]:
    """G g Gᵀ for every pair of channels: for each column j of the tile, (row i, I, O)."""
    # As additions of whole (I, O) matrices, like the other transforms: a product with a matrix of
    # three rows takes four times as long, and where weights change it is part of every call.
    g = jnp.transpose(w, (2, 3, 1, 0))
    columns = _combine(f.weight, [g[:, j] for j in range(3)])
    return [jnp.stack(_combine(f.weight, list(column))) for column in columns]


def _apply(x: jax.Array, u: list[jax.Array], shape: ConvShape, f: Transforms) -> jax.Array:
    m, n = f.m, f.m + 2
    batch, out = shape.batch, shape.out_spatial
    th, tw = (-(-size // m) for size in out)
    tiles = batch * th * tw
    high = [
        t * m + 2 - size - p
        for t, size, p in zip((th, tw), shape.spatial, shape.padding, strict=True)
    ]
    x = lax.optimization_barrier(pad_spatial(x, shape.padding, high))
    # Bᵀ d B: rows, then columns. Row i of all tiles is every m-th row of the input from row i on.
    # All rows of one column stay one array up to the end: one program and one (batched) product
    # per column compile three times as fast as one per element of the tile.
    width = tw * m + 2
    rows = [window(x, (i, 0), (th, width), (m, 1)) for i in range(n)]
    v = lax.optimization_barrier(jnp.stack(_combine(f.input, rows)))
    columns = [window(v, (0, j), (th, tw), (1, m), axis=2) for j in range(n)]
    columns = lax.optimization_barrier(_combine(f.input, columns))
    products = [
        lax.dot_general(
            column.reshape(n, tiles, shape.in_channels),
            weight,
            (((2,), (1,)), ((0,), (0,))),
            precision=shape.precision,
        )
        for column, weight in zip(columns, u, strict=True)
    ]
    # Aᵀ M A: the m outputs of each tile side by side, first along the width, then the height.
    # In one pass the last fusion would read all products, and take twice as long to compile.
    half = lax.optimization_barrier(
        [h.reshape(n, batch, th, tw, shape.out_channels) for h in _combine(f.output, products)]
    )
    columns = [jnp.stack(_combine(f.output, list(h)), axis=2) for h in half]
    result = jnp.stack(columns, axis=4).reshape(batch, th * m, tw * m, shape.out_channels)
    return result[:, : out[0], : out[1]]


def _applies(shape: ConvShape) -> bool:
    return (
        shape.kernel == (3, 3)
        and shape.stride == (1, 1)
        and shape.dilation == (1, 1)
        and shape.groups == 1
        and shape.dtype == "float32"
    )


WINOGRAD_F2 = ConvolutionProgram(
    "winograd_f2",
    _applies,
    lambda w, shape: _prepare(w, shape, F2),
    lambda x, u, shape: _apply(x, u, shape, F2),
)
WINOGRAD_F4 = ConvolutionProgram(
    "winograd_f4",
    _applies,
    lambda w, shape: _prepare(w, shape, F4),
    lambda x, u, shape: _apply(x, u, shape, F4),
)
