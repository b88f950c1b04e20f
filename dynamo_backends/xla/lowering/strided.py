"""Strided views, other element types, and images as columns of windows (unfold, fold)."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import fx

from dynamo_backends.graph.layouts import dense_order, row_major_strides
from dynamo_backends.xla.dtypes import accumulation_dtype, to_jax
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import register_lowering


def _offset(x: torch.Tensor, storage_offset: int | None) -> int:
    """Returns where a view begins, counted from the first element of `x`."""
    return 0 if storage_offset is None else storage_offset - int(x.storage_offset())


def _reach(size: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def _view_arguments(node: fx.Node, first: int) -> tuple[Any, Any, Any]:
    names = ("size", "stride", "storage_offset")
    given = dict(zip(names, node.args[first:], strict=False)) | dict(node.kwargs)
    return given["size"], given["stride"], given.get("storage_offset")


def _outside_memory(node: fx.Node, first: int) -> str | None:
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    size, stride, storage_offset = _view_arguments(node, first)
    if any(not isinstance(v, int) for v in (*x.shape, *x.stride(), *size, *stride)):
        return None  # asked again when the sizes are known
    if 0 in size:
        return None
    if dense_order(x) is None:
        return "the viewed tensor is not dense (it has gaps or overlaps)"
    begin = _offset(x, storage_offset)
    if begin < 0 or begin + _reach(size, stride) > x.numel():
        return "the view reaches memory outside the tensor it is taken of"
    return None


def _to_memory(ctx: Context, self: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    order = dense_order(ctx.node.args[0].meta["val"])  # type: ignore[union-attr]
    if order is None:
        raise ctx.refuse("the viewed tensor is not dense (it has gaps or overlaps)")
    return self.transpose(order).reshape(-1), order


def _places(size: Sequence[int], stride: Sequence[int], offset: int) -> jax.Array:
    places = jnp.full(tuple(size), offset, jnp.int64)
    for d, step in enumerate(stride):
        places = places + lax.broadcasted_iota(jnp.int64, tuple(size), d) * step
    return places


def _begin(ctx: Context, offset: int | None) -> int:
    reason = _outside_memory(ctx.node, 1 if "scatter" not in str(ctx.node.target) else 2)
    if reason is not None:
        raise ctx.refuse(reason)
    return _offset(ctx.node.args[0].meta["val"], offset)  # type: ignore[union-attr]


@register_lowering(
    "as_strided.default",
    "as_strided_copy.default",
    when=lambda node: _outside_memory(node, 1),
)
def as_strided(
    ctx: Context,
    self: jax.Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> jax.Array:
    """Returns a strided view of a tensor that fills its memory without gaps."""
    if 0 in size:
        return jnp.zeros(tuple(size), self.dtype)
    begin = _begin(ctx, storage_offset)
    memory, _ = _to_memory(ctx, self)
    dense = zip(size, stride, row_major_strides(size), strict=True)
    if all(n == 1 or s == d for n, s, d in dense):
        return memory[begin : begin + int(np.prod(size))].reshape(tuple(size))
    return jnp.take(memory, _places(size, stride, begin), mode="clip")


@register_lowering("as_strided_scatter.default", when=lambda node: _outside_memory(node, 2))
def as_strided_scatter(
    ctx: Context,
    self: jax.Array,
    src: jax.Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> jax.Array:
    if 0 in size:
        return self
    begin = _begin(ctx, storage_offset)
    memory, order = _to_memory(ctx, self)
    values = jnp.broadcast_to(src, tuple(size)).astype(self.dtype)
    memory = memory.at[_places(size, stride, begin)].set(values, mode="drop")
    shape = [self.shape[d] for d in order]
    return memory.reshape(shape).transpose(np.argsort(order))


def _as_bits(x: jax.Array) -> jax.Array:
    """The same memory as an array of unsigned or floating numbers that XLA can reinterpret."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        pairs = jnp.stack([x.real, x.imag], -1)
        return pairs.reshape(*x.shape[:-1], -1) if x.ndim else pairs
    return x


def _reinterpret(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    old, new = x.dtype.itemsize, jnp.dtype(dtype).itemsize
    if old == new:
        return lax.bitcast_convert_type(x, dtype)
    if old > new:
        parts = lax.bitcast_convert_type(x, dtype)
        return parts.reshape(*x.shape[:-1], -1) if x.ndim else parts
    grouped = x.reshape(*x.shape[:-1], -1, new // old)
    return lax.bitcast_convert_type(grouped, dtype)


@register_lowering("view.dtype", "view_copy.dtype", "prims::view_element_type.default")
def view_dtype(ctx: Context, self: jax.Array, dtype: torch.dtype) -> jax.Array:
    target = to_jax(dtype)
    if self.dtype == target:
        return self
    if self.size == 0:
        return jnp.zeros(ctx.out.shape, target)
    bits = _as_bits(self)
    if target == jnp.bool_:
        return _reinterpret(bits, jnp.uint8).reshape(ctx.out.shape) != 0
    if jnp.issubdtype(target, jnp.complexfloating):
        part = jnp.float32 if target == jnp.complex64 else jnp.float64
        pairs = _reinterpret(bits, part).reshape(*ctx.out.shape, 2)
        return lax.complex(pairs[..., 0], pairs[..., 1])
    return _reinterpret(bits, target).reshape(ctx.out.shape)


Pair = Sequence[int]


def _count(size: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _taps(kernel_size: Pair, dilation: Pair) -> Iterator[tuple[int, int]]:
    """Offsets of the window's elements, row by row."""
    rows, columns = kernel_size
    for i, j in itertools.product(range(rows), range(columns)):
        yield i * dilation[0], j * dilation[1]


@register_lowering("im2col.default")
def im2col(
    ctx: Context,
    self: jax.Array,
    kernel_size: Pair,
    dilation: Pair,
    padding: Pair,
    stride: Pair,
) -> jax.Array:
    """(N, C, H, W) to (N, C · kernel elements, windows)."""
    size = self.shape[-2:]
    counts = [
        _count(*values) for values in zip(size, kernel_size, dilation, padding, stride, strict=True)
    ]
    config = [(0, 0, 0)] * (self.ndim - 2) + [(p, p, 0) for p in padding]
    padded = lax.pad(self, self.dtype.type(0), config)
    parts = []
    for top, left in _taps(kernel_size, dilation):
        part = lax.slice_in_dim(padded, top, top + (counts[0] - 1) * stride[0] + 1, stride[0], -2)
        parts.append(
            lax.slice_in_dim(part, left, left + (counts[1] - 1) * stride[1] + 1, stride[1], -1)
        )
    return jnp.stack(parts, self.ndim - 2).reshape(ctx.out.shape)


@register_lowering("col2im.default")
def col2im(
    ctx: Context,
    self: jax.Array,
    output_size: Pair,
    kernel_size: Pair,
    dilation: Pair,
    padding: Pair,
    stride: Pair,
) -> jax.Array:
    """(N, C · kernel elements, windows) to (N, C, H, W), overlapping elements summed."""
    counts = [
        _count(*values)
        for values in zip(output_size, kernel_size, dilation, padding, stride, strict=True)
    ]
    wide = self.astype(accumulation_dtype(self.dtype))
    *batch, _, _ = self.shape
    taps = kernel_size[0] * kernel_size[1]
    windows = wide.reshape(*batch, ctx.out.shape[-3], taps, *counts)
    total = jnp.zeros(ctx.out.shape, wide.dtype)
    for k, offsets in enumerate(_taps(kernel_size, dilation)):
        config = [(0, 0, 0)] * (len(batch) + 1)
        for offset, size, count, p, s in zip(
            offsets, output_size, counts, padding, stride, strict=True
        ):
            low = offset - p
            config.append((low, size - low - (count - 1) * s - 1, s - 1))
        total = total + lax.pad(windows[..., k, :, :], wide.dtype.type(0), config)
    return total
