"""Interpolation to another size by separable resampling, forward and backward.

Positions and weights are computed in float64 and rounded to the dtype of the data (float32 for
half precision); the nearest neighbour's in float32, as torch's kernel does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Layout, register_lowering
from dynamo_backends.xla.lowering.values import Value, channels_last, wrap_channels_last

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


def pixel_scale(size: int, count: int, align_corners: bool, scale: float | None) -> float:
    """Returns the distance in input pixels between two neighbours in the output."""
    if align_corners:
        return (size - 1) / (count - 1) if count > 1 else 0.0
    return 1.0 / scale if scale is not None and scale > 0 else size / count


def _positions(
    size: int, count: int, align_corners: bool, scale: float | None, clamp: bool
) -> np.ndarray:
    distance = pixel_scale(size, count, align_corners, scale)
    if align_corners:
        return np.arange(count) * distance
    positions = (np.arange(count) + 0.5) * distance - 0.5
    return np.maximum(positions, 0) if clamp else positions


def nearest(size: int, count: int, scale: float | None, exact: bool = False) -> Taps:
    """Returns the taps of nearest-neighbour interpolation along one axis."""
    if count == size and not exact:
        places = np.arange(count)
    elif count == 2 * size and not exact:
        places = np.arange(count) // 2
    else:
        distance = np.float32(pixel_scale(size, count, False, scale))
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
    """Returns the taps of cubic interpolation along one axis."""
    positions = _positions(size, count, align_corners, scale, clamp=False)
    low = np.floor(positions)
    offsets = np.arange(-1, 3)
    weights = _cubic_weight((positions - low)[:, None] - offsets, -0.75)
    places = np.clip(low[:, None].astype(np.int64) + offsets, 0, size - 1)
    return Taps(places, weights, size)


def antialiased(
    size: int, count: int, align_corners: bool, scale: float | None, order: int
) -> Taps:
    """Returns the taps of linear or cubic interpolation with an antialiasing filter."""
    distance = pixel_scale(size, count, align_corners, scale)
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
    """Resamples an array along one axis.

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


Table = Callable[[int, int, float | None], Taps]  # of input size, output size and scale


def _integers(node: fx.Node) -> str | None:
    if not node.meta["val"].is_floating_point():
        return "torch interpolates integers with fixed-point weights"
    return None


def _upsample(ctx: Context, x: Value, scales: Sequence[float | None], table: Table) -> Value:
    array = channels_last(x)
    array = array.astype(accumulation_dtype(array.dtype))
    antialiasing = "_aa" in str(ctx.node.target)
    for axis, (count, scale) in enumerate(zip(ctx.out.shape[2:], scales, strict=True), 1):
        if antialiasing and array.shape[axis] == count:
            continue  # whatever the scale, as in torch
        array = resample(array, axis, table(array.shape[axis], count, scale))
    return wrap_channels_last(ctx, x, array)


def _gradient(
    ctx: Context,
    grad_output: Value,
    input_size: Sequence[int],
    scales: Sequence[float | None],
    table: Table,
) -> Value:
    array = channels_last(grad_output)
    name = str(ctx.node.target)
    if tuple(input_size) == tuple(grad_output.shape) and "exact" not in name and "_aa" not in name:
        return grad_output  # whatever the scale, and whatever the forward pass did, as in torch
    array = array.astype(accumulation_dtype(array.dtype))
    for axis, (size, scale) in enumerate(zip(input_size[2:], scales, strict=True), 1):
        taps = table(size, array.shape[axis], scale).transposed()
        array = resample(array, axis, taps)
    return wrap_channels_last(ctx, grad_output, array)


def _all(scales: tuple[float | None, ...], spatial: int) -> tuple[float | None, ...]:
    return scales + (None,) * (spatial - len(scales))


def _nearest(exact: bool) -> Table:
    return lambda size, count, scale: nearest(size, count, scale, exact)


def _linear(align_corners: bool) -> Table:
    return lambda size, count, scale: linear(size, count, align_corners, scale)


def _cubic(align_corners: bool) -> Table:
    return lambda size, count, scale: cubic(size, count, align_corners, scale)


def _antialiased(align_corners: bool, order: int) -> Table:
    return lambda size, count, scale: antialiased(size, count, align_corners, scale, order)


def _register_nearest(name: str, spatial: int, exact: bool) -> None:
    @register_lowering(f"{name}.default", layout=Layout.RAW)
    def forward(
        ctx: Context, self: Value, output_size: Sequence[int], *scales: float | None
    ) -> Value:
        array = channels_last(self)
        for axis, (count, scale) in enumerate(
            zip(output_size, _all(scales, spatial), strict=True), 1
        ):
            array = resample(array, axis, nearest(array.shape[axis], count, scale, exact))
        return wrap_channels_last(ctx, self, array)

    @register_lowering(f"{name}_backward.default", layout=Layout.RAW)
    def backward(
        ctx: Context,
        grad_output: Value,
        output_size: Sequence[int],
        input_size: Sequence[int],
        *scales: float | None,
    ) -> Value:
        return _gradient(ctx, grad_output, input_size, _all(scales, spatial), _nearest(exact))


def _register(name: str, spatial: int, table: Callable[[bool], Table]) -> None:
    @register_lowering(f"{name}.default", layout=Layout.RAW, when=_integers)
    def forward(
        ctx: Context,
        self: Value,
        output_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        return _upsample(ctx, self, _all(scales, spatial), table(align_corners))

    @register_lowering(f"{name}_backward.default", layout=Layout.RAW)
    def backward(
        ctx: Context,
        grad_output: Value,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        return _gradient(ctx, grad_output, input_size, _all(scales, spatial), table(align_corners))


for _n in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_n}d", _n, exact=False)
    _register_nearest(f"_upsample_nearest_exact{_n}d", _n, exact=True)
_register("upsample_linear1d", 1, _linear)
_register("upsample_bilinear2d", 2, _linear)
_register("upsample_trilinear3d", 3, _linear)
_register("upsample_bicubic2d", 2, _cubic)
_register("_upsample_bilinear2d_aa", 2, lambda align: _antialiased(align, 1))
_register("_upsample_bicubic2d_aa", 2, lambda align: _antialiased(align, 3))
