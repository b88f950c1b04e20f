"""Channels-last max and average pooling for XLA, over any number of spatial dimensions.

Written as maxima and sums over shifted inputs: on CPU about twice as fast as XLA's window
reductions. Large windows are reduced one dimension after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.convolution_shape import window

_SEPARATE_FROM = 16  # window elements from which one dimension after the other is faster


def pooled_size(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Output size of one dimension, as torch's ``pooling_output_shape``."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    out = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    # In ceil mode the last window must start inside the input or its left padding.
    return out - 1 if ceil_mode and (out - 1) * stride >= size + padding else out


@dataclass(frozen=True)
class Windows:
    """The windows of a pooling; sequences have a number per spatial dimension.

    Attributes:
        kernel: Elements of a window.
        stride: Distance between windows.
        padding: Positions added at both ends.
        dilation: Distance between the elements of a window.
        ceil_mode: Whether a last, partial window counts.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool = False

    @classmethod
    def of(
        cls,
        spatial: int,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> Windows:
        """From torch's arguments: one number is that of all dimensions, no stride the kernel's."""

        def full(values: int | Sequence[int]) -> tuple[int, ...]:
            values = (values,) if isinstance(values, int) else tuple(values)
            return values * spatial if len(values) == 1 else values

        window, shifts = full(kernel), full(stride) or full(kernel)
        return cls(window, shifts, full(padding), full(dilation), ceil_mode)

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """Returns where the elements of a window are, row by row."""
        along = [range(0, k * d, d) for k, d in zip(self.kernel, self.dilation, strict=True)]
        return list(itertools.product(*along))

    def starts(self, out: Sequence[int]) -> list[np.ndarray]:
        """Per dimension, where each of `out` windows starts in the unpadded input."""
        places = zip(out, self.stride, self.padding, strict=True)
        return [np.arange(count) * s - p for count, s, p in places]

    def over(self, spatial: Sequence[int]) -> tuple[list[int], list[int]]:
        """Output sizes, and the padding at the far ends that the last windows need.

        Args:
            spatial: Sizes of the input.

        Raises:
            ValueError: A window is larger than the padded input.
        """
        places = (self.kernel, self.stride, self.padding, self.dilation)
        arguments = list(zip(spatial, *places, strict=True))
        out = [pooled_size(*a, self.ceil_mode) for a in arguments]
        if any(o < 0 for o in out):
            padded = f"the padded input {tuple(spatial)}"
            raise ValueError(f"window {self.kernel} is larger than {padded}")
        high = [
            max(0, (o - 1) * s + (k - 1) * d + 1 - size - p) if o else 0
            for o, (size, k, s, p, d) in zip(out, arguments, strict=True)
        ]
        return out, high


def max_pool_nhwc(x: jax.Array, windows: Windows) -> jax.Array:
    """Max pooling; a NaN in a window makes its maximum NaN, as in torch.

    Args:
        x: Input, ``(N, *spatial, C)``, of a real type.
        windows: What is pooled; their padding is below every value.

    Returns:
        ``(N, *out_spatial, C)`` in ``x``'s dtype.
    """
    out, high = windows.over(x.shape[1:-1])
    padded = _pad(x, windows.padding, high, _lowest(x.dtype))
    return _over_windows(padded, out, windows, jnp.maximum)


def max_pool_with_indices_nhwc(x: jax.Array, windows: Windows) -> tuple[jax.Array, jax.Array]:
    """Max pooling, with where each maximum was found. To be traced with 64-bit types enabled.

    As in torch the first of several maxima counts, and of several NaNs the last.

    Args:
        x: Input, ``(N, *spatial, C)``, of a real type.
        windows: What is pooled; their padding is below every value.

    Returns:
        The maxima and their int64 positions in the flattened ``spatial``, both
        ``(N, *out_spatial, C)``.
    """
    spatial, n = x.shape[1:-1], x.ndim - 2
    out, high = windows.over(spatial)
    strides = [math.prod(spatial[d + 1 :]) for d in range(n)]
    narrow = np.int32 if math.prod(spatial) < 2**31 else np.int64
    starts = windows.starts(out)

    def flat(positions: Sequence[np.ndarray]) -> np.ndarray:
        index = sum(
            p.reshape((-1,) + (1,) * (n - 1 - d)) * strides[d] for d, p in enumerate(positions)
        )
        return np.asarray(index, narrow).reshape(1, *out, 1)

    padded = _pad(x, windows.padding, high, _lowest(x.dtype))
    best = jnp.full((x.shape[0], *out, x.shape[-1]), _lowest(x.dtype), x.dtype)
    # A window that holds nothing above the lowest value points at its first real element.
    steps = zip(starts, windows.dilation, strict=True)
    inside = [np.where(a < 0, a + -(a // d) * d, a) for a, d in steps]
    where = jnp.broadcast_to(flat(inside), best.shape)
    for offset in windows.offsets:
        value = window(padded, offset, out, windows.stride)
        better = value > best
        if jnp.issubdtype(x.dtype, jnp.floating):
            better |= jnp.isnan(value)
        position = flat([a + o for a, o in zip(starts, offset, strict=True)])
        best = jnp.where(better, value, best)
        where = jnp.where(better, position, where)
    return best, where.astype(jnp.int64)


def max_pool_argmax_nhwc(x: jax.Array, windows: Windows) -> jax.Array:
    """Returns for each window which of its elements is the maximum.

    Args:
        x: What is pooled, ``(N, *spatial, C)``, of a floating-point type.
        windows: As in the forward pass, of at most 127 elements.

    Returns:
        Elements counted row by row, ``(N, *out_spatial, C)``: the first maximum, or the last NaN.
    """
    # The same operations as in the forward pass: XLA computes them once.
    maxima, _ = max_pool_with_indices_nhwc(x, windows)
    spatial, offsets = x.shape[1:-1], windows.offsets
    out, high = windows.over(spatial)
    padded = _pad(x, windows.padding, high, _lowest(x.dtype))
    winner = jnp.full(maxima.shape, -1, jnp.int8)
    values = [window(padded, offset, out, windows.stride) for offset in offsets]
    real = [_is_real(spatial, windows.starts(out), offset) for offset in offsets]
    for element in reversed(range(len(offsets))):
        hit = (values[element] == maxima) & real[element]
        winner = jnp.where(hit, np.int8(element), winner)
    for element in range(len(offsets)):
        hit = jnp.isnan(values[element]) & real[element]
        winner = jnp.where(hit, np.int8(element), winner)
    return winner


def argmax_from_indices_nhwc(places: jax.Array, size: Sequence[int], windows: Windows) -> jax.Array:
    """Converts flat max-pool indices to element numbers within windows; -1 if outside."""
    winner, inside = jnp.zeros((), places.dtype), jnp.ones((), bool)
    numbers = (windows.kernel, windows.stride, windows.padding, windows.dilation)
    for axis, (k, s, p, d) in enumerate(zip(*numbers, strict=True)):
        along = lax.rem(lax.div(places, math.prod(size[axis + 1 :])), size[axis])
        start = lax.broadcasted_iota(places.dtype, places.shape, 1 + axis) * s - p
        element = lax.div(along - start, d)
        inside &= (element >= 0) & (element < k) & (element * d == along - start)
        winner = winner * k + element
    return jnp.where(inside, winner, -1).astype(jnp.int8)


def max_pool_backward_nhwc(
    grad: jax.Array, winner: jax.Array, size: Sequence[int], windows: Windows
) -> jax.Array:
    """Computes the input gradient of max pooling from each window's argmax.

    A sum over the elements of a window, with zeros between the windows, is 2 to 10 times slower:
    XLA tests at every place whether it is one of the zeros.

    Args:
        grad: Gradient of the maxima, ``(N, *out_spatial, C)``.
        winner: Which element of each window is the maximum, of the same shape.
        size: Spatial size of the input.
        windows: As in the forward pass.

    Returns:
        ``(N, *size, C)`` in ``grad``'s dtype.
    """
    stride, padding = windows.stride, windows.padding
    n, (batch, *out, channels) = len(stride), grad.shape
    # The padded input is cut into cells as large as a stride; in each begins at most one window.
    cells = [
        max(o, -(-(p + extent) // s))
        for o, p, extent, s in zip(out, padding, size, stride, strict=True)
    ]
    last = windows.offsets[-1]
    reach = [furthest // s for furthest, s in zip(last, stride, strict=True)]
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
        elements = _elements(windows.offsets, back, stride).astype(winner.dtype)
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
    """Returns what the places of a cell are in the window that begins `back` cells earlier.

    Returns:
        Numbers of elements, ``stride``-shaped; -2, which wins nowhere, where the window has none.
    """
    table = np.full(stride, -2)
    for inside in np.ndindex(*stride):
        offset = tuple(i + b * s for i, b, s in zip(inside, back, stride, strict=True))
        if offset in offsets:
            table[inside] = offsets.index(offset)
    return table


def _is_real(
    spatial: Sequence[int], starts: Sequence[np.ndarray], offset: Sequence[int]
) -> np.ndarray:
    """Returns whether an element of each window lies in the unpadded input, ``(1, *out, 1)``."""
    real = np.ones((1,), bool)
    for size, start, shift in zip(spatial, starts, offset, strict=True):
        place = start + shift
        real = real[..., None] & ((place >= 0) & (place < size))
    return real[..., None]


def avg_pool_nhwc(
    x: jax.Array, windows: Windows, count_include_pad: bool, divisor_override: int | None = None
) -> jax.Array:
    """Average pooling. Sixteen-bit floats are summed in float32; integers divide towards zero.

    Args:
        x: Input, ``(N, *spatial, C)``.
        windows: What is averaged, without dilation; their padding is zeros.
        count_include_pad: Whether the padding counts in the divisor.
        divisor_override: Divide by this instead of by the number of elements.

    Returns:
        ``(N, *out_spatial, C)`` in ``x``'s dtype.
    """
    out, high = windows.over(x.shape[1:-1])
    wide = accumulation_dtype(x.dtype)
    padded = _pad(x.astype(wide), windows.padding, high, np.zeros((), wide))
    total = _over_windows(padded, out, windows, lax.add)
    divisor = _divisor(x.shape[1:-1], windows, windows.starts(out), count_include_pad)
    if divisor_override is not None:
        divisor = np.asarray(divisor_override)
    elif divisor.size and (divisor == divisor.flat[0]).all():
        divisor = divisor.flat[0]
    divisors = jnp.broadcast_to(jnp.asarray(divisor, wide), total.shape)
    return lax.div(total, divisors).astype(x.dtype)


def _divisor(
    spatial: Sequence[int], windows: Windows, starts: Sequence[np.ndarray], count_include_pad: bool
) -> np.ndarray:
    """Returns how many elements each window averages, ``(1, *out, 1)``."""
    counts = np.ones((1,), np.int64)
    for size, start, k, p in zip(spatial, starts, windows.kernel, windows.padding, strict=True):
        end = np.minimum(start + k, size + p)
        count = end - start
        if not count_include_pad:
            count = np.minimum(end, size) - np.maximum(start, 0)
        counts = counts[..., None] * count
    return counts[..., None]


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
    windows: Windows,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Combine all elements of each window of the padded input."""
    n = len(out)
    if 0 in out:
        return jnp.zeros((x.shape[0], *out, x.shape[-1]), x.dtype)
    if math.prod(windows.kernel) <= _SEPARATE_FROM:
        shifted = [window(x, offset, out, windows.stride) for offset in windows.offsets]
        return reduce(combine, shifted)
    for axis in range(n):
        size, step = list(x.shape[1:-1]), [1] * n
        size[axis], step[axis] = out[axis], windows.stride[axis]
        shifted = []
        for i in range(windows.kernel[axis]):
            offset = [0] * n
            offset[axis] = i * windows.dilation[axis]
            shifted.append(window(x, offset, size, step))
        x = reduce(combine, shifted)
    return x
