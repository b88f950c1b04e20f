"""Adaptive pooling: the windows are chosen so that the result has a given size."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering import pooling_programs as programs
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.layouts import batched_channels_last, unbatched
from dynamo_backends.xla.lowering.pooling import max_pool_gradient, spatial_rank, transposed
from dynamo_backends.xla.lowering.registry import Layout, lowers
from dynamo_backends.xla.lowering.values import Value


def _windows(size: int, count: int) -> list[tuple[int, int]]:
    """Window i of torch's adaptive pooling: from ⌊i·size/count⌋ to ⌈(i+1)·size/count⌉."""
    return [(i * size // count, -((i + 1) * size // -count)) for i in range(count)]


def _even(size: Sequence[int], counts: Sequence[int]) -> programs.Windows | None:
    """Returns all windows, if they are of one size and do not overlap."""
    if not all(n and m and n % m == 0 for n, m in zip(size, counts, strict=True)):
        return None
    kernel = [n // m for n, m in zip(size, counts, strict=True)]
    return programs.Windows.of(len(kernel), kernel)


def _per_window(
    x: jax.Array, axis: int, count: int, reduce: Callable[[jax.Array, int], jax.Array]
) -> jax.Array:
    """Applies `reduce(part, axis)` to each window along an axis."""
    size = x.shape[axis]
    if size % count == 0:
        shape = (*x.shape[:axis], count, size // count, *x.shape[axis + 1 :])
        return reduce(x.reshape(shape), axis + 1)
    parts = [
        reduce(lax.slice_in_dim(x, begin, end, axis=axis), axis)
        for begin, end in _windows(size, count)
    ]
    return jnp.stack(parts, axis)


def _mean(x: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Means over the windows of an array (N, *spatial, C)."""
    if all(n == 1 for n in counts):
        return x.mean(tuple(range(1, x.ndim - 1)), keepdims=True)
    for axis, count in enumerate(counts, 1):
        if count != x.shape[axis]:
            x = _per_window(x, axis, count, lambda part, d: part.mean(d))
    return x


@lowers("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default", layout=Layout.RAW)
def adaptive_avg_pool(ctx: Context, self: Value, output_size: Sequence[int]) -> Value:
    spatial = spatial_rank(ctx)
    x, batched = batched_channels_last(self, spatial)
    out = _mean(x.astype(accumulation_dtype(x.dtype)), ctx.out.shape[-spatial:])
    return unbatched(ctx, self, out, batched)


@lowers(
    "_adaptive_avg_pool2d_backward.default",
    "_adaptive_avg_pool3d_backward.default",
    layout=Layout.RAW,
)
def adaptive_avg_pool_backward(ctx: Context, grad_output: Value, self: Value) -> Value:
    counts = grad_output.shape[-spatial_rank(ctx) :]
    return transposed(ctx, grad_output, self, lambda x: _mean(x, counts))


def _pick(values: jax.Array, places: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first of the largest numbers along an axis, or the last NaN, and its place."""
    nan = jnp.isnan(values)
    last = values.shape[axis] - 1 - jnp.argmax(jnp.flip(nan, axis), axis)
    best = jnp.where(nan.any(axis), last, jnp.argmax(values, axis))
    best = jnp.expand_dims(best, axis)
    return (
        jnp.take_along_axis(values, best, axis, mode="clip").squeeze(axis),
        jnp.take_along_axis(places, best, axis, mode="clip").squeeze(axis),
    )


@lowers("adaptive_max_pool2d.default", "adaptive_max_pool3d.default", layout=Layout.RAW)
def adaptive_max_pool(ctx: Context, self: Value, output_size: Sequence[int]) -> tuple[Value, Value]:
    """Maxima, and their flat spatial places; of equal elements the first, of NaN the last."""
    spatial = spatial_rank(ctx)
    x, batched = batched_channels_last(self, spatial)
    size, counts = x.shape[1:-1], tuple(ctx.out[0].shape[-spatial:])
    windows = _even(size, counts)
    if windows is not None:
        values, places = programs.max_pool_with_indices_nhwc(x, windows)
    else:
        places = lax.iota(jnp.int64, x[0, ..., 0].size).reshape(1, *size, 1)
        values, places = x, jnp.broadcast_to(places, x.shape)
        for axis in range(spatial, 0, -1):  # the last axis first: ties go to the first row
            pairs = [
                _pick(
                    lax.slice_in_dim(values, begin, end, axis=axis),
                    lax.slice_in_dim(places, begin, end, axis=axis),
                    axis,
                )
                for begin, end in _windows(size[axis - 1], counts[axis - 1])
            ]
            values = jnp.stack([v for v, _ in pairs], axis)
            places = jnp.stack([p for _, p in pairs], axis)
    return unbatched(ctx, self, values, batched), unbatched(ctx, self, places, batched)


@lowers(
    "adaptive_max_pool2d_backward.default",
    "adaptive_max_pool3d_backward.default",
    layout=Layout.RAW,
)
def adaptive_max_pool_backward(
    ctx: Context, grad_output: Value, self: Value, indices: Value
) -> Value:
    spatial = spatial_rank(ctx)
    size, counts = self.shape[-spatial:], grad_output.shape[-spatial:]
    windows = _even(size, counts)
    return max_pool_gradient(ctx, grad_output, self, indices, windows)
