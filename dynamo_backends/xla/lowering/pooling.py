"""Pooling over windows, adaptive too, forward and backward; programs are in `pooling_programs`."""

import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from torch import fx

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering import pooling_nhwc as programs
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Layout, register_lowering
from dynamo_backends.xla.lowering.values import Value, batched_channels_last, unbatched

_MOST_SHIFTS = 64  # a larger window's gradient is scattered


@register_lowering(
    "max_pool2d_with_indices.default", "max_pool3d_with_indices.default", layout=Layout.RAW
)
def max_pool_with_indices(
    ctx: Context,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    spatial = spatial_rank(ctx)
    windows = programs.Windows.of(spatial, kernel_size, stride, padding, dilation, ceil_mode)
    x, batched = batched_channels_last(self, spatial)
    if any(u.target is not operator.getitem or u.args[1] == 1 for u in ctx.node.users):
        values, places = programs.max_pool_with_indices_nhwc(x, windows)
    else:
        values = programs.max_pool_nhwc(x, windows)
        places = jnp.zeros(values.shape, jnp.int64)
    return unbatched(ctx, self, values, batched), unbatched(ctx, self, places, batched)


def _scatter_windows(grad: jax.Array, places: jax.Array, size: Sequence[int]) -> jax.Array:
    """Adds gradients (N, *out, C) to the flat spatial places they come from, by a scatter."""
    batch, channels = grad.shape[0], grad.shape[-1]
    flat = (batch, -1, channels)
    rows = lax.broadcasted_iota(places.dtype, (batch, 1, 1), 0)
    columns = lax.broadcasted_iota(places.dtype, (1, 1, channels), 2)
    total = jnp.zeros((batch, math.prod(size), channels), grad.dtype)
    total = total.at[rows, places.reshape(flat), columns].add(grad.reshape(flat), mode="drop")
    return total.reshape(batch, *size, channels)


def max_pool_gradient(
    ctx: Context,
    grad_output: Value,
    self: Value,
    indices: Value,
    windows: programs.Windows | None,
) -> Value:
    """Returns the gradient of a max pooling; without regular windows it follows the indices."""
    spatial = spatial_rank(ctx)
    grad, batched = batched_channels_last(grad_output, spatial)
    places, _ = batched_channels_last(indices, spatial)
    size = tuple(self.shape[-spatial:])
    wide = grad.astype(accumulation_dtype(grad.dtype))
    if windows is None or math.prod(windows.kernel) > _MOST_SHIFTS:
        total = _scatter_windows(wide, places, size)
        return unbatched(ctx, grad_output, total, batched)
    if _pools_here(ctx.node):
        x, _ = batched_channels_last(self, spatial)
        winner = programs.max_pool_argmax_nhwc(x, windows)
    else:
        winner = programs.argmax_from_indices_nhwc(places, size, windows)
    total = programs.max_pool_backward_nhwc(wide, winner, size, windows)
    return unbatched(ctx, grad_output, total, batched)


def _pools_here(node: fx.Node) -> bool:
    """Returns whether the forward pass of a max pooling's backward is in the same graph."""
    indices, pooled = node.args[-1], node.args[1]
    source = indices.args[0] if isinstance(indices, fx.Node) and indices.args else None
    if not isinstance(source, fx.Node) or "max_pool" not in str(source.target):
        return False
    return source.args[0] is pooled


@register_lowering(
    "max_pool2d_with_indices_backward.default",
    "max_pool3d_with_indices_backward.default",
    layout=Layout.RAW,
)
def max_pool_with_indices_backward(
    ctx: Context,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value,
) -> Value:
    spatial = spatial_rank(ctx)
    windows = programs.Windows.of(spatial, kernel_size, stride, padding, dilation, ceil_mode)
    return max_pool_gradient(ctx, grad_output, self, indices, windows)


@register_lowering(
    "avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default", layout=Layout.RAW
)
def avg_pool(
    ctx: Context,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    spatial = spatial_rank(ctx)
    x, batched = batched_channels_last(self, spatial)
    wide = x.astype(accumulation_dtype(x.dtype))
    windows = programs.Windows.of(spatial, kernel_size, stride, padding, ceil_mode=ceil_mode)
    out = programs.avg_pool_nhwc(wide, windows, count_include_pad, divisor_override)
    return unbatched(ctx, self, out, batched)


@register_lowering("avg_pool2d_backward.default", "avg_pool3d_backward.default", layout=Layout.RAW)
def avg_pool_backward(
    ctx: Context,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    windows = programs.Windows.of(
        spatial_rank(ctx), kernel_size, stride, padding, ceil_mode=ceil_mode
    )

    def forward(x: jax.Array) -> jax.Array:
        return programs.avg_pool_nhwc(x, windows, count_include_pad, divisor_override)

    return linear_pool_gradient(ctx, grad_output, self, forward)


def linear_pool_gradient(
    ctx: Context, grad_output: Value, like: Value, forward: Callable[[jax.Array], jax.Array]
) -> Value:
    """Returns the input gradient of a linear pooling, by transposing its forward.

    Args:
        ctx: The call.
        grad_output: Of the pooling's result.
        like: What was pooled.
        forward: The pooling, of arrays (N, *spatial, C).
    """
    spatial = spatial_rank(ctx)
    grad, batched = batched_channels_last(grad_output, spatial)
    wide = grad.astype(accumulation_dtype(grad.dtype))
    shape = (wide.shape[0], *like.shape[-spatial:], wide.shape[-1])
    (total,) = jax.linear_transpose(forward, jax.ShapeDtypeStruct(shape, wide.dtype))(wide)
    return unbatched(ctx, grad_output, total, batched)


def spatial_rank(ctx: Context) -> int:
    """Returns how many dimensions a call pools over, which its name says."""
    name = str(ctx.node.target)
    return next(n for n in (1, 2, 3) if f"{n}d" in name)


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


@register_lowering(
    "_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default", layout=Layout.RAW
)
def adaptive_avg_pool(ctx: Context, self: Value, output_size: Sequence[int]) -> Value:
    spatial = spatial_rank(ctx)
    x, batched = batched_channels_last(self, spatial)
    out = _mean(x.astype(accumulation_dtype(x.dtype)), ctx.out.shape[-spatial:])
    return unbatched(ctx, self, out, batched)


@register_lowering(
    "_adaptive_avg_pool2d_backward.default",
    "_adaptive_avg_pool3d_backward.default",
    layout=Layout.RAW,
)
def adaptive_avg_pool_backward(ctx: Context, grad_output: Value, self: Value) -> Value:
    counts = grad_output.shape[-spatial_rank(ctx) :]
    return linear_pool_gradient(ctx, grad_output, self, lambda x: _mean(x, counts))


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


@register_lowering("adaptive_max_pool2d.default", "adaptive_max_pool3d.default", layout=Layout.RAW)
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


@register_lowering(
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
