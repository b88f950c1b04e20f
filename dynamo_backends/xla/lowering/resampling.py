"""Separable resampling: for every axis, which input elements an output element is made of.

Everything is known when the graph is lowered, so the tables are computed with numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MOST_TAPS = 16  # beyond, a product with a matrix is cheaper


@dataclass(frozen=True)
class Taps:
    """One axis of a resampling: `out[i] = sum over k of weight[i, k] * x[place[i, k]]`.

    Attributes:
        places: (out, taps), indices into the input.
        weights: (out, taps), float64; 0 where an output element needs fewer taps.
        size: Length of the input.
    """

    places: np.ndarray
    weights: np.ndarray
    size: int

    def matrix(self) -> np.ndarray:
        """Returns the same as a dense matrix (out, in)."""
        dense = np.zeros((len(self.places), self.size))
        rows = np.broadcast_to(np.arange(len(self.places))[:, None], self.places.shape)
        np.add.at(dense, (rows, self.places), self.weights)
        return dense

    def transposed(self) -> "Taps":
        """Returns the gradient's table: which output elements an input element went into."""
        dense = self.matrix().T
        used = [np.flatnonzero(row) for row in dense]
        most = max(1, max((len(u) for u in used), default=1))
        places = np.zeros((len(dense), most), np.int64)
        for row, columns in enumerate(used):
            if len(columns):  # a place repeated with weight 0 brings in no foreign NaN
                places[row] = np.pad(columns, (0, most - len(columns)), mode="edge")
        weights = np.take_along_axis(dense, places, 1)
        for row, columns in enumerate(used):
            weights[row, len(columns) :] = 0
        return Taps(places, weights, dense.shape[1])


def step(size: int, count: int, align_corners: bool, scale: float | None) -> float:
    """Distance in the input between two neighbours in the output."""
    if align_corners:
        return (size - 1) / (count - 1) if count > 1 else 0.0
    return 1.0 / scale if scale is not None and scale > 0 else size / count


def _positions(
    size: int, count: int, align_corners: bool, scale: float | None, clamp: bool
) -> np.ndarray:
    distance = step(size, count, align_corners, scale)
    if align_corners:
        return np.arange(count) * distance
    positions = (np.arange(count) + 0.5) * distance - 0.5
    return np.maximum(positions, 0) if clamp else positions


def nearest(size: int, count: int, scale: float | None, exact: bool = False) -> Taps:
    """Nearest neighbour, computed in float32 as torch does for every dtype."""
    if count == size and not exact:
        places = np.arange(count)
    elif count == 2 * size and not exact:
        places = np.arange(count) // 2
    else:
        distance = np.float32(step(size, count, False, scale))
        shift = np.float32(0.5 if exact else 0)
        places = np.floor((np.arange(count, dtype=np.float32) + shift) * distance)
    places = np.minimum(places.astype(np.int64), size - 1)[:, None]
    return Taps(places, np.ones(places.shape), size)


def linear(size: int, count: int, align_corners: bool, scale: float | None) -> Taps:
    """Linear interpolation between two neighbours."""
    if count == size:
        return nearest(size, count, None)
    positions = _positions(size, count, align_corners, scale, clamp=True)
    low = np.minimum(np.floor(positions).astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    part = np.clip(positions - low, 0, 1)
    return Taps(np.stack([low, high], 1), np.stack([1 - part, part], 1), size)


def _cubic_weight(distance: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def cubic(size: int, count: int, align_corners: bool, scale: float | None) -> Taps:
    """Cubic convolution with a = −0.75, the border repeated."""
    positions = _positions(size, count, align_corners, scale, clamp=False)
    low = np.floor(positions)
    offsets = np.arange(-1, 3)
    weights = _cubic_weight((positions - low)[:, None] - offsets, -0.75)
    places = np.clip(low[:, None].astype(np.int64) + offsets, 0, size - 1)
    return Taps(places, weights, size)


def antialiased(
    size: int, count: int, align_corners: bool, scale: float | None, order: int
) -> Taps:
    """Linear (order 1) or cubic (order 3, a = −0.5) with a filter as wide as the step."""
    distance = step(size, count, align_corners, scale)
    stretch = max(distance, 1.0)
    support = (order + 1) / 2 * stretch
    filter_: Callable[[np.ndarray], np.ndarray]
    if order == 1:
        filter_ = lambda x: np.maximum(1 - np.abs(x), 0)  # noqa: E731
    else:
        filter_ = lambda x: _cubic_weight(x, -0.5)  # noqa: E731
    centers = distance * (np.arange(count) + 0.5)
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centers + support + 0.5).astype(np.int64), size)
    lengths = np.maximum(last - first, 0)
    offsets = np.arange(max(1, int(lengths.max(initial=1))))
    places = first[:, None] + offsets
    weights = filter_((places - centers[:, None] + 0.5) / stretch)
    weights = np.where(offsets < lengths[:, None], weights, 0)
    total = weights.sum(1, keepdims=True)
    weights = np.divide(weights, total, out=weights, where=total != 0)
    places = np.minimum(places, np.maximum(last - 1, first)[:, None])
    return Taps(np.minimum(places, size - 1), weights, size)


def _take(x: jax.Array, places: np.ndarray, axis: int) -> jax.Array:
    """`x[places]` along an axis, without a gather where a slice or repetition does."""
    size, count = x.shape[axis], len(places)
    if np.array_equal(places, np.arange(size)):
        return x
    if count and count % size == 0 and np.array_equal(places, np.arange(count) * size // count):
        return jnp.repeat(x, count // size, axis)
    steps = np.diff(places)
    if count > 1 and steps[0] > 0 and (steps == steps[0]).all():
        stride = int(steps[0])
        return lax.slice_in_dim(x, int(places[0]), int(places[-1]) + 1, stride, axis)
    return jnp.take(x, places, axis=axis, mode="clip")


def resample(x: jax.Array, axis: int, taps: Taps) -> jax.Array:
    """Resamples one axis.

    Args:
        x: An array in the dtype in which to compute (any dtype if there is only one tap of 1).
        axis: Which axis, of length `taps.size`.
        taps: The table.
    """
    count = taps.places.shape[1]
    if count == 1 and (taps.weights == 1).all():
        return _take(x, taps.places[:, 0], axis)
    if count > _MOST_TAPS:
        matrix = jnp.asarray(taps.matrix().astype(x.dtype))
        out = jnp.tensordot(x, matrix, ((axis,), (1,)), precision=lax.Precision.HIGHEST)
        return jnp.moveaxis(out, -1, axis)
    shape = [1] * x.ndim
    shape[axis] = -1
    total = None
    for k in range(count):
        weight = taps.weights[:, k].astype(x.dtype).reshape(shape)
        part = _take(x, taps.places[:, k], axis)
        if not (weight == 1).all():
            part = part * weight
        total = part if total is None else total + part
    assert total is not None
    return total
