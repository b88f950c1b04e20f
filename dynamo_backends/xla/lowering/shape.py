"""Operators that only rearrange: views, their copies, and the inverses of views."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import (
    Layout,
    Promotion,
    register_lowering,
    register_pointwise,
)
from dynamo_backends.xla.lowering.values import (
    ChannelsLast,
    Value,
    channels_last,
    stored_array,
    stored_axis,
    to_logical_array,
    wrap_in_layout_of,
)


@register_lowering(
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "view_copy.default",
    "_reshape_copy.default",
    "_reshape_alias.default",
    "unsqueeze.default",
    "unsqueeze_copy.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "squeeze_copy.default",
    "squeeze_copy.dim",
    "squeeze_copy.dims",
    "flatten.using_ints",
    "prims::collapse.default",
    "prims::collapse_view.default",
    "prims::split_dim.default",
    "prims::squeeze.default",
    "prims::reshape.default",
)
def reshape(ctx: Context, self: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    return self.reshape(ctx.out.shape)


@register_pointwise(
    "alias.default",
    "alias_copy.default",
    "detach.default",
    "detach_copy.default",
    "clone.default",
    "contiguous.default",
    "lift_fresh_copy.default",
    "lift_fresh.default",
    "prims::clone.default",
    "prims::view_of.default",
    promote=Promotion.NONE,
)
def identity(self: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    return self


@register_lowering("permute.default", "permute_copy.default", "prims::transpose.default")
def permute(self: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.transpose(self, [d % max(self.ndim, 1) for d in dims])


@register_lowering("transpose.int", "transpose_copy.int")
def transpose(self: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(self, dim0, dim1) if self.ndim else self


@register_lowering("t.default", "t_copy.default")
def t(self: jax.Array) -> jax.Array:
    return self.T


@register_lowering("expand.default", "expand_copy.default")
def expand(ctx: Context, self: jax.Array, size: Sequence[int], **kwargs: Any) -> jax.Array:
    return jnp.broadcast_to(self, ctx.out.shape)


@register_lowering("prims::broadcast_in_dim.default")
def broadcast_in_dim(
    a: jax.Array, shape: Sequence[int], broadcast_dimensions: Sequence[int]
) -> jax.Array:
    return lax.broadcast_in_dim(a, tuple(shape), tuple(broadcast_dimensions))


@register_lowering("slice.Tensor", "slice_copy.Tensor", layout=Layout.RAW)
def slice_tensor(
    self: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    axis = stored_axis(self, dim)
    begin, stop, step = slice(start, end, step).indices(self.shape[dim])
    return wrap_in_layout_of(
        self, lax.slice_in_dim(stored_array(self), begin, max(begin, stop), step, axis=axis)
    )


@register_lowering("narrow_copy.default", layout=Layout.RAW)
def narrow_copy(self: Value, dim: int, start: int, length: int) -> Value:
    start = start % self.shape[dim] if start < 0 else start
    return slice_tensor(self, dim, start, start + length)


@register_lowering("select.int", "select_copy.int")
def select(self: jax.Array, dim: int, index: int) -> jax.Array:
    return lax.index_in_dim(self, index, dim, keepdims=False)


def _cut(self: Value, sizes: Sequence[int], dim: int) -> tuple[Value, ...]:
    axis, array, start = stored_axis(self, dim), stored_array(self), 0
    parts = []
    for size in sizes:
        parts.append(
            wrap_in_layout_of(self, lax.slice_in_dim(array, start, start + size, axis=axis))
        )
        start += size
    return tuple(parts)


@register_lowering(
    "split.Tensor",
    "split_copy.Tensor",
    "unsafe_split.Tensor",
    "unsafe_chunk.default",
    "chunk.default",
    layout=Layout.RAW,
)
def split(ctx: Context, self: Value, split_size: int, dim: int = 0) -> tuple[Value, ...]:
    return _cut(self, [part.shape[dim] for part in ctx.out], dim)


@register_lowering(
    "split_with_sizes.default",
    "split_with_sizes_copy.default",
    "unsafe_split_with_sizes.default",
    "split.sizes",
    layout=Layout.RAW,
)
def split_with_sizes(self: Value, split_sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    return _cut(self, split_sizes, dim)


@register_lowering("unbind.int", "unbind_copy.int")
def unbind(self: jax.Array, dim: int = 0) -> tuple[jax.Array, ...]:
    return tuple(select(self, dim, i) for i in range(self.shape[dim]))


@register_lowering("cat.default", "concat.default", "concatenate.default", layout=Layout.RAW)
def cat(ctx: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation; as in torch, 1-d empty tensors are left out whatever the other shapes."""
    parts = [x for x in tensors if tuple(x.shape) != (0,)] or list(tensors[:1])
    dtype, ndim = ctx.out_dtype, parts[0].ndim
    if any(isinstance(x, ChannelsLast) for x in parts):
        axis = stored_axis(ChannelsLast(channels_last(parts[0])), dim)
        return ChannelsLast(lax.concatenate([channels_last(x).astype(dtype) for x in parts], axis))
    return lax.concatenate([to_logical_array(x).astype(dtype) for x in parts], dim % ndim)


@register_lowering("prims::cat.default", layout=Layout.RAW)
def prims_cat(ctx: Context, tensors: Sequence[Value], dim: int) -> Value:
    return cat(ctx, tensors, dim)


@register_lowering("stack.default")
def stack(ctx: Context, tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    return jnp.stack([x.astype(ctx.out_dtype) for x in tensors], dim)


@register_lowering("flip.default", "prims::rev.default", layout=Layout.RAW)
def flip(self: Value, dims: Sequence[int]) -> Value:
    if self.ndim == 0:
        return self
    return wrap_in_layout_of(
        self, lax.rev(stored_array(self), [stored_axis(self, d) for d in dims])
    )


@register_lowering("roll.default")
def roll(self: jax.Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> jax.Array:
    if not dims:
        return jnp.roll(self, shifts[0])
    for shift, dim in zip(shifts, dims, strict=True):
        size = self.shape[dim]
        if size:
            cut = -shift % size
            parts = [
                lax.slice_in_dim(self, cut, size, axis=dim),
                lax.slice_in_dim(self, 0, cut, axis=dim),
            ]
            self = lax.concatenate(parts, dim % self.ndim)
    return self


@register_lowering("repeat.default")
def repeat(ctx: Context, self: jax.Array, repeats: Sequence[int]) -> jax.Array:
    own = (1,) * (len(repeats) - self.ndim) + self.shape
    spread = [n for pair in zip([1] * len(own), own, strict=True) for n in pair]
    target = [n for pair in zip(repeats, own, strict=True) for n in pair]
    return jnp.broadcast_to(self.reshape(spread), target).reshape(ctx.out.shape)


@register_lowering("diagonal.default", "diagonal_copy.default")
def diagonal(self: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    return jnp.diagonal(self, offset, dim1, dim2)


@register_lowering("unfold.default", "unfold_copy.default")
def unfold(ctx: Context, self: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    """Sliding windows; the window becomes the last dimension."""
    if self.ndim == 0:
        return self.reshape(ctx.out.shape)
    dimension = dimension % self.ndim
    count = (self.shape[dimension] - size) // step + 1
    if size == step:
        whole = lax.slice_in_dim(self, 0, count * size, axis=dimension)
        shape = (*self.shape[:dimension], count, size, *self.shape[dimension + 1 :])
        return jnp.moveaxis(whole.reshape(shape), dimension + 1, -1)
    if size <= count:
        span = (count - 1) * step + 1
        parts = [lax.slice_in_dim(self, i, i + span, step, axis=dimension) for i in range(size)]
        return jnp.stack(parts, -1) if parts else jnp.zeros(ctx.out.shape, self.dtype)
    windows = [
        lax.slice_in_dim(self, i * step, i * step + size, axis=dimension) for i in range(count)
    ]
    return jnp.moveaxis(jnp.stack(windows, dimension), dimension + 1, -1)


@register_lowering("unfold_backward.default")
def unfold_backward(
    ctx: Context, grad_in: jax.Array, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> jax.Array:
    if not input_sizes:
        return grad_in.reshape(())
    total = jnp.zeros(tuple(input_sizes), grad_in.dtype)
    dim = dim % len(input_sizes)
    rest = input_sizes[dim] - (grad_in.shape[dim] - 1) * step - 1
    for i in range(size):
        config = [(0, 0, 0)] * len(input_sizes)
        config[dim] = (i, rest - i, step - 1)
        total = total + lax.pad(grad_in[..., i], grad_in.dtype.type(0), config)
    return total


def _pad_like_slice(
    x: jax.Array, fill: Any, size: int, dim: int, start: int, step: int
) -> jax.Array:
    """The inverse of a slice: `x` goes to `start, start+step, ...`, `fill` everywhere else."""
    config = [(0, 0, 0)] * x.ndim
    count = x.shape[dim]
    covered = (count - 1) * step + 1 if count else 0
    config[dim] = (start, size - start - covered, step - 1)
    return lax.pad(x, x.dtype.type(fill), config)


@register_lowering("slice_backward.default", layout=Layout.RAW)
def slice_backward(
    grad_output: Value, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Value:
    begin = slice(start, end, step).indices(input_sizes[dim])[0]
    axis = stored_axis(grad_output, dim)
    padded = _pad_like_slice(stored_array(grad_output), 0, input_sizes[dim], axis, begin, step)
    return wrap_in_layout_of(grad_output, padded)


@register_lowering("select_backward.default")
def select_backward(
    grad_output: jax.Array, input_sizes: Sequence[int], dim: int, index: int
) -> jax.Array:
    dim = dim % len(input_sizes)
    grad = jnp.expand_dims(grad_output, dim)
    return _pad_like_slice(grad, 0, input_sizes[dim], dim, index % input_sizes[dim], 1)


@register_lowering("slice_scatter.default")
def slice_scatter(
    self: jax.Array,
    src: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    dim = dim % self.ndim
    size = self.shape[dim]
    begin, stop, step = slice(start, end, step).indices(size)
    count = len(range(begin, stop, step))
    if not count:
        return self
    shape = (*self.shape[:dim], count, *self.shape[dim + 1 :])
    src = jnp.broadcast_to(src, shape).astype(self.dtype)
    if step == 1:
        return src if count == size else lax.dynamic_update_slice_in_dim(self, src, begin, dim)
    places = lax.broadcasted_iota(jnp.int32, self.shape, dim) - begin
    inside = (places >= 0) & (places < (count - 1) * step + 1) & (places % step == 0)
    return jnp.where(inside, _pad_like_slice(src, 0, size, dim, begin, step), self)


@register_lowering("select_scatter.default")
def select_scatter(self: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    dim = dim % self.ndim
    index = index % self.shape[dim]
    shape = (*self.shape[:dim], *self.shape[dim + 1 :])
    src = jnp.expand_dims(jnp.broadcast_to(src, shape), dim)
    return slice_scatter(self, src, dim, index, index + 1)


@register_lowering("diagonal_scatter.default")
def diagonal_scatter(
    self: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    moved = jnp.moveaxis(self, (dim1, dim2), (-2, -1))
    rows, columns = moved.shape[-2:]
    row = jnp.arange(rows)
    inside = jnp.arange(columns) == row[:, None] + offset
    # Spread the diagonal over its rows, then keep it where row and column match.
    first = max(0, -offset)
    spread = [(0, 0, 0)] * (src.ndim - 1) + [(first, rows - first - src.shape[-1], 0)]
    column = lax.pad(src.astype(self.dtype), self.dtype.type(0), spread)[..., None]
    return jnp.moveaxis(jnp.where(inside, column, moved), (-2, -1), (dim1, dim2))


@register_lowering("diagonal_backward.default")
def diagonal_backward(
    grad_output: jax.Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> jax.Array:
    zeros = jnp.zeros(tuple(input_sizes), grad_output.dtype)
    return diagonal_scatter(zeros, grad_output, offset, dim1, dim2)
