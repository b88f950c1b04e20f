"""Chooses the fastest program for a convolution, and computes convolutions; Winograd's 3×3.

XLA's own convolution is the best program for some shapes only: on CPU a depthwise convolution is
up to thirty times faster as shifted multiply-adds. `RULES` is the whole choice. It was tuned with
`benchmarks/xla_convolution.py`, which measures every program on every shape it is right for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dynamo_backends.kernels.winograd_transforms import F2, F4, Transforms
from dynamo_backends.xla.lowering.convolution_algorithms import (
    DOT,
    IM2COL,
    LAX,
    PATCHES,
    SHIFTS,
    ConvolutionAlgorithm,
    Prepared,
)
from dynamo_backends.xla.lowering.convolution_shape import (
    ConvolutionParams,
    ConvShape,
    pad_spatial,
    window,
)


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


WINOGRAD_F2 = ConvolutionAlgorithm(
    "winograd_f2",
    _applies,
    lambda w, shape: _prepare(w, shape, F2),
    lambda x, u, shape: _apply(x, u, shape, F2),
)
WINOGRAD_F4 = ConvolutionAlgorithm(
    "winograd_f4",
    _applies,
    lambda w, shape: _prepare(w, shape, F4),
    lambda x, u, shape: _apply(x, u, shape, F4),
)


# --- blocks: a grouped convolution as dense ones, each by its own rule ----------------------------

_MAX_BLOCKS = 64  # compile time grows with the number of blocks


def groups_per_block(shape: ConvShape, channels: int = 16) -> int:
    """Returns how many groups to merge so that a block has at least ``channels`` input channels."""
    divisors = (b for b in range(1, shape.groups + 1) if shape.groups % b == 0)
    return next(
        (
            b
            for b in divisors
            if b * shape.in_per_group >= channels and shape.groups // b <= _MAX_BLOCKS
        ),
        shape.groups,
    )


def blocks_program(
    name: str, channels: int, inner: Callable[[ConvShape], ConvolutionAlgorithm] | None = None
) -> ConvolutionAlgorithm:
    """Returns an algorithm that runs grouped convolutions on block-diagonal weights.

    Merged groups get a block-diagonal weight, so a non-finite input of one group reaches the
    other groups of its block as NaN.

    Args:
        name: Name of the program.
        channels: Least input channels of a block, up to which groups are merged.
        inner: Chooses the program for one block; by default the rules do.
    """
    inner = inner or choose_algorithm

    def block(shape: ConvShape) -> tuple[int, ConvShape]:
        merged = groups_per_block(shape, channels)
        return merged, shape.one_of(shape.groups // merged)

    def prepare(w: jax.Array, shape: ConvShape) -> list[Prepared]:
        merged, dense = block(shape)
        split = w.reshape(-1, merged, shape.out_per_group, shape.in_per_group, *shape.kernel)
        diagonal = jnp.eye(merged, dtype=bool).reshape(
            (1, merged, 1, merged, 1, *(1,) * len(shape.kernel))
        )
        # out channel (i, o), in channel (j, c): zero where the groups i and j differ
        weights = jnp.where(diagonal, split[:, :, :, None], jnp.zeros((), w.dtype))
        weights = weights.reshape(-1, dense.out_channels, dense.in_channels, *shape.kernel)
        return [inner(dense).prepare(one, dense) for one in weights]

    def apply(x: jax.Array, prepared: list[Prepared], shape: ConvShape) -> jax.Array:
        _, dense = block(shape)
        parts = jnp.split(x, len(prepared), axis=-1)
        program = inner(dense)
        results = [program.apply(part, p, dense) for part, p in zip(parts, prepared, strict=True)]
        return results[0] if len(results) == 1 else jnp.concatenate(results, axis=-1)

    return ConvolutionAlgorithm(name, lambda s: s.groups > 1, prepare, apply)


def choose_algorithm(shape: ConvShape) -> ConvolutionAlgorithm:
    """Returns the algorithm that the rules choose for a convolution of this shape."""
    return choose_rule(shape).program


def choose_rule(shape: ConvShape) -> Rule:
    """Returns the first rule whose algorithm applies to ``shape`` and whose test holds."""
    return next(rule for rule in RULES if rule.program.applies(shape) and rule.when(shape))


BLOCKS = blocks_program("blocks", channels=16)

PROGRAMS: tuple[ConvolutionAlgorithm, ...] = (
    LAX,
    DOT,
    PATCHES,
    IM2COL,
    SHIFTS,
    BLOCKS,
    WINOGRAD_F2,
    WINOGRAD_F4,
)


# --- the rules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Maps a condition on the shape to the convolution algorithm to use."""

    program: ConvolutionAlgorithm
    when: Callable[[ConvShape], bool]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        LAX,
        lambda s: s.platform != "cpu",
        "libraries of accelerators, and XLA's partitioner, choose their own algorithms",
    ),
    Rule(DOT, lambda s: True, "a convolution with one tap is one matrix product"),
    Rule(
        PATCHES,
        lambda s: True,
        "patches that do not overlap can be extracted without redundant copies",
    ),
    Rule(
        SHIFTS,
        lambda s: s.in_per_group <= 4 and s.groups >= 8,
        "small groups have no data reuse in a matrix product, but fill the vector units",
    ),
    Rule(BLOCKS, lambda s: s.groups > 1, "XLA's grouped convolution on CPUs is a scalar loop"),
    Rule(
        IM2COL,
        lambda s: s.in_channels <= 4 and 1 < s.taps <= 9 and len(s.kernel) > 1,
        "few channels do not fill a vector, but the taps together do",
    ),
    Rule(
        WINOGRAD_F4,
        lambda s: min(s.in_channels, s.out_channels) >= 64 and 28 <= min(s.out_spatial) <= 112,
        "a quarter of the multiplications, if the image fills the 4×4 tiles",
    ),
    Rule(
        WINOGRAD_F2,
        lambda s: min(s.in_channels, s.out_channels) >= 64 and min(s.out_spatial) < 28,
        "less than half of the multiplications; 4×4 tiles would waste too much of the image",
    ),
    Rule(LAX, lambda s: True, "no better algorithm is known"),
)


# --- the convolution ------------------------------------------------------------------------------


def convolve(
    x: jax.Array,
    w: jax.Array,
    **settings: Unpack[ConvolutionParams],
) -> jax.Array:
    """Convolve over any number of spatial dimensions, channels last, without bias.

    Sixteen-bit floats are summed in float32. Everything done to ``w`` alone comes first, as plain
    operations on it, so that a pass over the jaxpr can compute it once ahead of the calls.

    Args:
        x: Input, ``(N, *spatial, C_in)``.
        w: Weight in torch's layout, ``(C_out, C_in / groups, *kernel)``.
        **settings: See `ConvolutionParams`.

    Returns:
        ``(N, *out_spatial, C_out)`` in ``x``'s dtype.

    Raises:
        ValueError: if the arguments do not fit together, or the kernel exceeds the padded input.
    """
    shape = ConvShape.of(x, w, **settings)
    if shape.is_empty:
        return jnp.zeros(shape.out_shape, x.dtype)
    return choose_algorithm(shape)(x, w, shape)
