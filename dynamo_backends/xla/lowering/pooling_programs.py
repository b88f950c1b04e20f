"""Channels-last max and average pooling for XLA, over any number of spatial dimensions.

Written as maxima and sums over shifted inputs: on CPU about twice as fast as XLA's window
reductions. Large windows are reduced one dimension after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dynamo_backends.xla.lowering.convolution_shape import accumulator, window

_SEPARATE_FROM = 16  # window elements from which one dimension after the other is faster


def pooled_size(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Output size of one dimension, as torch's ``pooling_output_shape``."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    out = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    # In ceil mode the last window must start inside the input or its left padding.
    return out - 1 if ceil_mode and (out - 1) * stride >= size + padding else out


def max_pool_nhwc(
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> jax.Array:
    """Max pooling; a NaN in a window makes its maximum NaN, as in torch.

    Args:
        x: Input, ``(N, *spatial, C)``, of a real type.
        kernel: Window size per spatial dimension.
        stride: Distance between windows, per spatial dimension.
        padding: Positions below every value added at both ends.
        dilation: Distance between the elements of a window.
        ceil_mode: Whether a last, partial window counts.

    Returns:
        ``(N, *out_spatial, C)`` in ``x``'s dtype.
    """
    out, high = _geometry(x, kernel, stride, padding, dilation, ceil_mode)
    padded = _pad(x, padding, high, _lowest(x.dtype))
    return _over_windows(padded, out, kernel, stride, dilation, jnp.maximum)


def max_pool_with_indices_nhwc(
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[jax.Array, jax.Array]:
    """Max pooling, with where each maximum was found. To be traced with 64-bit types enabled.

    As in torch the first of several maxima counts, and of several NaNs the last.

    Args:
        x: Input, ``(N, *spatial, C)``, of a real type.
        kernel: Window size per spatial dimension.
        stride: Distance between windows, per spatial dimension.
        padding: Positions below every value added at both ends.
        dilation: Distance between the elements of a window.
        ceil_mode: Whether a last, partial window counts.

    Returns:
        The maxima and their int64 positions in the flattened ``spatial``, both
        ``(N, *out_spatial, C)``.
    """
    out, high = _geometry(x, kernel, stride, padding, dilation, ceil_mode)
    spatial, n = x.shape[1:-1], x.ndim - 2
    strides = [math.prod(spatial[d + 1 :]) for d in range(n)]
    narrow = np.int32 if math.prod(spatial) < 2**31 else np.int64
    # Per dimension, where each window starts in the unpadded input.
    starts = [np.arange(o) * s - p for o, s, p in zip(out, stride, padding, strict=True)]

    def flat(positions: Sequence[np.ndarray]) -> np.ndarray:
        index = sum(
            p.reshape((-1,) + (1,) * (n - 1 - d)) * strides[d] for d, p in enumerate(positions)
        )
        return np.asarray(index, narrow).reshape(1, *out, 1)

    padded = _pad(x, padding, high, _lowest(x.dtype))
    best = jnp.full((x.shape[0], *out, x.shape[-1]), _lowest(x.dtype), x.dtype)
    # A window that holds nothing above the lowest value points at its first real element.
    inside = [np.where(a < 0, a + -(a // d) * d, a) for a, d in zip(starts, dilation, strict=True)]
    where = jnp.broadcast_to(flat(inside), best.shape)
    for tap in itertools.product(*map(range, kernel)):
        offset = [i * d for i, d in zip(tap, dilation, strict=True)]
        value = window(padded, offset, out, stride)
        better = value > best
        if jnp.issubdtype(x.dtype, jnp.floating):
            better |= jnp.isnan(value)
        position = flat([a + o for a, o in zip(starts, offset, strict=True)])
        best = jnp.where(better, value, best)
        where = jnp.where(better, position, where)
    return best, where.astype(jnp.int64)


def max_pool_winners_nhwc(
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> jax.Array:
    """Which element of each window is its maximum, in a program that also pools.

    Args:
        x: What is pooled, ``(N, *spatial, C)``, of a floating-point type.
        kernel: Window size per spatial dimension, at most 127 elements; this and the others as in
            the forward pass.
        stride: Distance between windows, per spatial dimension.
        padding: Positions below every value added at both ends.
        dilation: Distance between the elements of a window.
        ceil_mode: Whether a last, partial window counts.

    Returns:
        Elements counted row by row, ``(N, *out_spatial, C)``: the first maximum, or the last NaN.
    """
    # The same operations as in the forward pass: XLA computes them once.
    maxima, _ = max_pool_with_indices_nhwc(x, kernel, stride, padding, dilation, ceil_mode)
    out, high = _geometry(x, kernel, stride, padding, dilation, ceil_mode)
    padded = _pad(x, padding, high, _lowest(x.dtype))
    offsets = _offsets(kernel, dilation)
    winner = jnp.full(maxima.shape, -1, jnp.int8)
    values = [window(padded, offset, out, stride) for offset in offsets]
    real = [_is_real(x.shape[1:-1], out, stride, padding, offset) for offset in offsets]
    for element in reversed(range(len(offsets))):
        hit = (values[element] == maxima) & real[element]
        winner = jnp.where(hit, np.int8(element), winner)
    for element in range(len(offsets)):
        hit = jnp.isnan(values[element]) & real[element]
        winner = jnp.where(hit, np.int8(element), winner)
    return winner


def winners_at_nhwc(
    places: jax.Array,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """The same, from flat places in the unpadded input of spatial size `size`; -1 if outside."""
    winner, inside = jnp.zeros((), places.dtype), jnp.ones((), bool)
    for axis, (k, s, p, d) in enumerate(zip(kernel, stride, padding, dilation, strict=True)):
        along = lax.rem(lax.div(places, math.prod(size[axis + 1 :])), size[axis])
        start = lax.broadcasted_iota(places.dtype, places.shape, 1 + axis) * s - p
        element = lax.div(along - start, d)
        inside &= (element >= 0) & (element < k) & (element * d == along - start)
        winner = winner * k + element
    return jnp.where(inside, winner, -1).astype(jnp.int8)


def give_to_winners_nhwc(
    grad: jax.Array,
    winner: jax.Array,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """The gradient of max pooling: each element of the input asks the few windows it lies in.

    A sum over the elements of a window, with zeros between the windows, is 2 to 10 times slower:
    XLA tests at every place whether it is one of the zeros.

    Args:
        grad: Gradient of the maxima, ``(N, *out_spatial, C)``.
        winner: Which element of each window is the maximum, of the same shape.
        size: Spatial size of the input.
        kernel: Window size per spatial dimension; this and the others as in the forward pass.
        stride: Distance between windows, per spatial dimension.
        padding: Positions added at both ends.
        dilation: Distance between the elements of a window.

    Returns:
        ``(N, *size, C)`` in ``grad``'s dtype.
    """
    n, (batch, *out, channels) = len(kernel), grad.shape
    # The padded input is cut into cells as large as a stride; in each begins at most one window.
    cells = [
        max(o, -(-(p + extent) // s))
        for o, p, extent, s in zip(out, padding, size, stride, strict=True)
    ]
    reach = [(k - 1) * d // s for k, d, s in zip(kernel, dilation, stride, strict=True)]
    more = [(back, count - o, 0) for back, count, o in zip(reach, cells, out, strict=True)]
    edges = [(0, 0, 0), *more, (0, 0, 0)]
    winner = lax.pad(winner, winner.dtype.type(-1), edges)
    zero = grad.dtype.type(0)
    grad = lax.pad(grad, zero, edges)

    shape = (batch, *itertools.chain(*zip(cells, stride, strict=True)), channels)
    of_cells, in_cells = (0, *range(1, 2 * n, 2), 2 * n + 1), tuple(range(2, 2 * n + 1, 2))
    total = jnp.zeros(shape, grad.dtype)
    for back in itertools.product(*(range(r + 1) for r in reach)):
        start = [0, *(r - b for r, b in zip(reach, back, strict=True)), 0]
        end = [batch, *(a + c for a, c in zip(start[1:-1], cells, strict=True)), channels]
        elements = _elements(_offsets(kernel, dilation), back, stride).astype(winner.dtype)
        here = lax.broadcast_in_dim(jnp.asarray(elements), shape, in_cells)
        won = here == lax.broadcast_in_dim(lax.slice(winner, start, end), shape, of_cells)
        given = lax.broadcast_in_dim(lax.slice(grad, start, end), shape, of_cells)
        total = total + jnp.where(won, given, zero)
    total = total.reshape(batch, *(c * s for c, s in zip(cells, stride, strict=True)), channels)
    ends = [p + extent for p, extent in zip(padding, size, strict=True)]
    return lax.slice(total, (0, *padding, 0), (batch, *ends, channels))


def _elements(
    offsets: Sequence[tuple[int, ...]], back: Sequence[int], stride: Sequence[int]
) -> np.ndarray:
    """What the places of a cell are in the window that begins `back` cells earlier.

    Returns:
        Numbers of elements, ``stride``-shaped; -2, which wins nowhere, where the window has none.
    """
    table = np.full(stride, -2)
    for inside in np.ndindex(*stride):
        offset = tuple(i + b * s for i, b, s in zip(inside, back, stride, strict=True))
        if offset in offsets:
            table[inside] = offsets.index(offset)
    return table


def _offsets(kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, ...]]:
    """Where the elements of a window are, row by row."""
    along = [range(0, k * d, d) for k, d in zip(kernel, dilation, strict=True)]
    return list(itertools.product(*along))


def _is_real(
    spatial: Sequence[int],
    out: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    offset: Sequence[int],
) -> np.ndarray:
    """Whether an element of each window lies in the unpadded input, ``(1, *out, 1)``."""
    real = np.ones((1,), bool)
    for size, o, s, p, shift in zip(spatial, out, stride, padding, offset, strict=True):
        place = np.arange(o) * s - p + shift
        real = real[..., None] & ((place >= 0) & (place < size))
    return real[..., None]


def avg_pool_nhwc(
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> jax.Array:
    """Average pooling. Sixteen-bit floats are summed in float32; integers divide towards zero.

    Args:
        x: Input, ``(N, *spatial, C)``.
        kernel: Window size per spatial dimension.
        stride: Distance between windows, per spatial dimension.
        padding: Zeros added at both ends.
        ceil_mode: Whether a last, partial window counts.
        count_include_pad: Whether the padding counts in the divisor.
        divisor_override: Divide by this instead of by the number of elements.

    Returns:
        ``(N, *out_spatial, C)`` in ``x``'s dtype.
    """
    ones = (1,) * len(kernel)
    out, high = _geometry(x, kernel, stride, padding, ones, ceil_mode)
    wide = accumulator(x.dtype)
    padded = _pad(x.astype(wide), padding, high, np.zeros((), wide))
    total = _over_windows(padded, out, kernel, stride, ones, lax.add)
    divisor = _divisor(x.shape[1:-1], out, kernel, stride, padding, count_include_pad)
    if divisor_override is not None:
        divisor = np.asarray(divisor_override)
    elif divisor.size and (divisor == divisor.flat[0]).all():
        divisor = divisor.flat[0]
    divisors = jnp.broadcast_to(jnp.asarray(divisor, wide), total.shape)
    return lax.div(total, divisors).astype(x.dtype)


def _divisor(
    spatial: Sequence[int],
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count_include_pad: bool,
) -> np.ndarray:
    """How many elements each window averages, ``(1, *out, 1)``."""
    counts = np.ones((1,), np.int64)
    for size, o, k, s, p in zip(spatial, out, kernel, stride, padding, strict=True):
        start = np.arange(o) * s - p
        end = np.minimum(start + k, size + p)
        count = end - start
        if not count_include_pad:
            count = np.minimum(end, size) - np.maximum(start, 0)
        counts = counts[..., None] * count
    return counts[..., None]


def _geometry(
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[list[int], list[int]]:
    """Output sizes, and the padding at the far ends that the last windows need."""
    arguments = list(zip(x.shape[1:-1], kernel, stride, padding, dilation, strict=True))
    out = [pooled_size(*a, ceil_mode) for a in arguments]
    if any(o < 0 for o in out):
        raise ValueError(f"window {tuple(kernel)} is larger than the padded input {x.shape[1:-1]}")
    high = [
        max(0, (o - 1) * s + (k - 1) * d + 1 - size - p) if o else 0
        for o, (size, k, s, p, d) in zip(out, arguments, strict=True)
    ]
    return out, high


def _lowest(dtype: np.dtype) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).min, dtype)


def _pad(x: jax.Array, low: Sequence[int], high: Sequence[int], value: np.ndarray) -> jax.Array:
    if any(low) or any(high):
        edges = [(0, 0, 0), *((a, b, 0) for a, b in zip(low, high, strict=True)), (0, 0, 0)]
        # The barrier keeps XLA from computing the padding again for each shift.
        x = lax.optimization_barrier(lax.pad(x, jnp.asarray(value), edges))
    return x


def _over_windows(
    x: jax.Array,
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Combine all elements of each window of the padded input."""
    n = len(kernel)
    if 0 in out:
        return jnp.zeros((x.shape[0], *out, x.shape[-1]), x.dtype)
    if math.prod(kernel) <= _SEPARATE_FROM:
        offsets = itertools.product(
            *([i * d for i in range(k)] for k, d in zip(kernel, dilation, strict=True))
        )
        return reduce(combine, (window(x, offset, out, stride) for offset in offsets))
    for axis in range(n):
        size, step = list(x.shape[1:-1]), [1] * n
        size[axis], step[axis] = out[axis], stride[axis]
        shifted = []
        for i in range(kernel[axis]):
            offset = [0] * n
            offset[axis] = i * dilation[axis]
            shifted.append(window(x, offset, size, step))
        x = reduce(combine, shifted)
    return x
