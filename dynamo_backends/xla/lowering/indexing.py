"""Gathering and scattering with index tensors, and bags of embedding vectors.

Out-of-range indices: eager torch raises on the CPU and traps on CUDA. A compiled graph cannot
raise; here reads are clamped to the last element and writes are dropped. Negative indices count
from the end wherever torch lets them.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import fx

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Layout, by_name, register_lowering
from dynamo_backends.xla.lowering.values import ChannelsLast, Value, cast, scalar, to_logical_array

Indices = Sequence[jax.Array | None]


def _is_mask(index: Any) -> bool:
    return isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _reads_by_mask(node: fx.Node) -> str | None:
    if any(map(_is_mask, node.args[1])):  # type: ignore[arg-type]
        return "indexing with a mask gives a result whose shape depends on the data"
    return None


def _writes_by_mask(node: fx.Node) -> str | None:
    indices: Any = node.args[1]
    masks = [i for i, x in enumerate(indices) if _is_mask(x)]
    if not masks:
        return None
    tensors = sum(x is not None for x in indices)
    values = node.args[2].meta["val"]  # type: ignore[union-attr]
    behind = node.meta["val"].ndim - indices[masks[0]].meta["val"].ndim - masks[0]
    if tensors == 1 and (values.ndim <= behind or values.shape[-1 - behind] == 1):
        return None
    return "which value is written where depends on the data in the mask"


def _key(indices: Indices) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


@register_lowering("index.Tensor", "_unsafe_index.Tensor", layout=Layout.RAW, when=_reads_by_mask)
def index(self: Value, indices: Sequence[Value | None]) -> Value:
    """Lowers aten.index to a gather; indexing pixels of a channels-last image keeps the layout."""
    places = [to_logical_array(i) for i in indices]
    if isinstance(self, ChannelsLast) and places[:2] == [None, None]:
        spatial = [i for i in places[2:] if i is not None]
        shape = jnp.broadcast_shapes(*(i.shape for i in spatial))
        if len(spatial) == len(shape) == self.ndim - 2:
            return ChannelsLast(self.array.at[(slice(None), *spatial)].get(mode="clip"))
    return to_logical_array(self).at[_key(places)].get(mode="clip")


def _put_where(
    self: jax.Array, mask: jax.Array, axis: int, values: jax.Array, accumulate: bool
) -> jax.Array:
    """Writes one value, or one for every element in front of and behind the mask's dimensions."""
    behind = self.ndim - axis - mask.ndim
    if values.ndim > behind:
        front = values.shape[: values.ndim - behind - 1]
        tail = values.shape[values.ndim - behind :]
        values = values.reshape(*front, *(1,) * mask.ndim, *tail)
    mask = mask.astype(bool).reshape(*mask.shape, *(1,) * behind)
    if accumulate:
        return jnp.where(mask, self | values if self.dtype == bool else self + values, self)
    return jnp.where(mask, values, self)


def _put_slice(self: jax.Array, axis: int, index: Any, values: jax.Array) -> jax.Array:
    """Writes what one index names, if it is within the array.

    In place, where XLA owns the memory: of a loop that runs once or not at all it knows that,
    while it would fuse a mere update with whoever reads the result, and copy the array for that.
    """
    size = self.shape[axis]
    front, behind = self.shape[:axis], self.shape[axis + 1 :]
    values = jnp.broadcast_to(values, (*front, *index.shape, *behind)).reshape(*front, 1, *behind)
    at = index.reshape(())
    at = jnp.where(at < 0, at + size, at)

    def write(state: tuple[Any, ...]) -> tuple[Any, ...]:
        _, array, values, at = state
        written = lax.dynamic_update_slice_in_dim(array, values, at, axis)
        return jnp.array(False), written, values, at

    inside = (at >= 0) & (at < size)
    return lax.while_loop(lambda state: state[0], write, (inside, self, values, at))[1]


@register_lowering(
    "index_put.default",
    "_unsafe_index_put.default",
    "_index_put_impl.default",
    when=_writes_by_mask,
)
def index_put(
    self: jax.Array,
    indices: Indices,
    values: jax.Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> jax.Array:
    """Writes at index tensors; of several writes to one place, the last one wins on the CPU."""
    values = cast(values, self.dtype)
    for axis, mask in enumerate(indices):
        if mask is not None and mask.dtype in (jnp.bool_, jnp.uint8):
            return _put_where(self, mask, axis, values, accumulate)
    if not accumulate:
        axes = [axis for axis, index in enumerate(indices) if index is not None]
        index = indices[axes[0]] if len(axes) == 1 and self.size else None
        if index is not None and index.size == 1:
            return _put_slice(self, axes[0], index, values)
        return self.at[_key(indices)].set(values, mode="drop")
    if self.dtype == jnp.bool_:
        return self.at[_key(indices)].max(values, mode="drop")
    wide = accumulation_dtype(self.dtype)
    return self.astype(wide).at[_key(indices)].add(values.astype(wide), mode="drop")


@register_lowering("index_select.default", "index_select_copy.default")
def index_select(ctx: Context, self: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    flat = self.reshape(self.shape or (1,))
    return jnp.take(flat, index.reshape(-1), axis=dim, mode="clip").reshape(ctx.out.shape)


@register_lowering("embedding.default")
@by_name
def embedding(ctx: Context, weight: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(weight, indices, axis=0, mode="clip")


@register_lowering("embedding_dense_backward.default")
def embedding_dense_backward(
    grad_output: jax.Array,
    indices: jax.Array,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> jax.Array:
    wide = accumulation_dtype(grad_output.dtype)
    rows = indices.reshape(-1)
    grad = grad_output.reshape(rows.shape[0], grad_output.shape[-1]).astype(wide)
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, wide).at[rows].add(1, mode="drop")
        grad = grad / jnp.take(counts, rows, mode="clip")[:, None]
    if padding_idx >= 0:
        rows = jnp.where(rows == padding_idx, num_weights, rows)
    return jnp.zeros((num_weights, grad.shape[1]), wide).at[rows].add(grad, mode="drop")


@register_lowering("take.default")
def take(self: jax.Array, index: jax.Array) -> jax.Array:
    return self.reshape(-1).at[index].get(mode="clip")


@register_lowering("put.default")
def put(
    self: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False
) -> jax.Array:
    flat, values = self.reshape(-1), source.reshape(-1)
    return index_put(flat, [index.reshape(-1)], values, accumulate).reshape(self.shape)


def _along(shape: Sequence[int], dim: int, index: jax.Array) -> tuple[jax.Array, ...]:
    """Coordinates of the elements `[i, …, index[i, …, k], …, k]` of an array of this shape."""
    places = [jax.lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(len(shape))]
    places[dim] = index
    return tuple(places)


@register_lowering("gather.default")
def gather(self: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    if self.ndim == 0 or index.ndim == 0:
        return jnp.take(self.reshape(-1), index, mode="clip")
    dim = dim % self.ndim
    if 0 in index.shape:
        return jnp.zeros(index.shape, self.dtype)
    # Fewer dimensions in the index tuple make a cheaper XLA gather.
    whole = [*index.shape[:dim], self.shape[dim], *index.shape[dim + 1 :]]
    if tuple(whole) == self.shape:
        return jnp.take_along_axis(self, index, dim, mode="clip")
    places = _along(self.shape, dim, index)
    return self.at[places].get(mode="clip", wrap_negative_indices=False)


def _scatter(self: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str) -> jax.Array:
    """Writes `src[i, …, k]` to `self[i, …, index[i, …, k], …, k]`, combined by `reduce`."""
    if self.ndim == 0:
        flat = _scatter(self[None], 0, index.reshape(-1), src.reshape(-1), reduce)
        return flat.reshape(())
    if index.ndim == 0:
        index, src = index[None], src.reshape(-1)
    if 0 in index.shape:
        return self
    src = src[tuple(slice(0, n) for n in index.shape)]
    at = self.at[_along(self.shape, dim % self.ndim, index)]
    write: Any = {
        "set": at.set,
        "sum": at.add,
        "prod": at.multiply,
        "amax": at.max,
        "amin": at.min,
    }[reduce]
    return write(src.astype(self.dtype), mode="drop", wrap_negative_indices=False)


def _scatter_wide(
    self: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str
) -> jax.Array:
    if self.dtype == jnp.bool_:
        reduce = {"sum": "amax", "prod": "amin"}.get(reduce, reduce)
    wide = accumulation_dtype(self.dtype)
    return _scatter(self.astype(wide), dim, index, src.astype(wide), reduce)


_REDUCTIONS = {"add": "sum", "multiply": "prod"}


@register_lowering("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce")
def scatter(
    self: jax.Array, dim: int, index: jax.Array, src: Any, *, reduce: str | None = None
) -> jax.Array:
    if not isinstance(src, jax.Array):
        src = jnp.broadcast_to(scalar(src, self.dtype), index.shape)
    if reduce is None:
        return _scatter(self, dim, index, src, "set")
    return _scatter_wide(self, dim, index, src, _REDUCTIONS[reduce])


@register_lowering("scatter_add.default")
def scatter_add(self: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return _scatter_wide(self, dim, index, src, "sum")


def _identity(reduce: str, dtype: jnp.dtype) -> Any:
    if reduce in ("sum", "mean"):
        return dtype.type(0)
    if reduce == "prod":
        return dtype.type(1)
    if dtype == jnp.bool_:
        return dtype.type(reduce == "amin")
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype.type(-math.inf if reduce == "amax" else math.inf)
    return jnp.iinfo(dtype).min if reduce == "amax" else jnp.iinfo(dtype).max


@register_lowering("scatter_reduce.two")
def scatter_reduce(
    self: jax.Array,
    dim: int,
    index: jax.Array,
    src: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    """`reduce`: sum, prod, mean (integers round down), amax or amin; NaN wins in the last two."""
    wide = accumulation_dtype(self.dtype)
    total = self.astype(wide)
    counts = jnp.full(self.shape, int(include_self), jnp.int32)
    ones = jnp.ones(index.shape, jnp.int32)
    if not include_self or reduce == "mean":
        counts = _scatter(counts, dim, index, ones, "sum")
    if not include_self:
        total = jnp.where(counts > 0, _identity(reduce, wide), total)
    total = _scatter_wide(total, dim, index, src, "sum" if reduce == "mean" else reduce)
    if reduce != "mean":
        return total
    counts = jnp.maximum(counts, 1)
    if jnp.issubdtype(wide, jnp.integer):
        return total // counts.astype(wide)
    return total / counts.astype(wide)


@register_lowering("index_reduce.default")
def index_reduce(
    self: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    if self.ndim == 0:
        index = index.reshape(source.shape)
    else:
        dim = dim % self.ndim
        shape = [1] * self.ndim
        shape[dim] = -1
        source = source.reshape(source.shape or (1,))
        index = jnp.broadcast_to(index.reshape(shape), source.shape)
    return scatter_reduce(self, dim, index, source, reduce, include_self=include_self)


@register_lowering("masked_scatter.default")
def masked_scatter(self: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """The true places of the mask take the elements of `source` in order."""
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    self, mask = jnp.broadcast_to(self, shape), jnp.broadcast_to(mask, shape)
    if source.size == 0:
        return self
    places = jnp.cumsum(mask.reshape(-1), dtype=jnp.int64).reshape(shape) - 1
    return jnp.where(mask, jnp.take(source.reshape(-1), places, mode="clip"), self)


@register_lowering("nonzero_static.default")
def nonzero_static(ctx: Context, self: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    if self.ndim == 0:
        return jnp.zeros(ctx.out.shape, jnp.int64)
    return jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), -1)


_SUM, _MEAN, _MAX = 0, 1, 2


@register_lowering("_embedding_bag_forward_only.default")
@by_name
def embedding_bag(
    ctx: Context,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    mode: int = 0,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, ...]:
    """Bags of the flat `indices`, each from its offset to the next; empty bags give zeros.

    Only the first result is defined: the others serve a backward pass that does not exist here.
    """
    bags = ctx.out[0].shape[0]
    wide = accumulation_dtype(weight.dtype)
    starts = offsets[:bags]
    places = jnp.arange(indices.shape[0])
    # Repeated offsets make empty bags: an element belongs to the last bag that starts before it.
    bag = jnp.searchsorted(starts, places, side="right", method="compare_all") - 1
    counted = bag >= 0
    if include_last_offset:
        counted &= places < offsets[-1]
    if padding_idx >= 0:
        counted &= indices != padding_idx
    bag = jnp.where(counted, bag, bags)
    rows = jnp.take(weight, indices, axis=0, mode="clip").astype(wide)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None].astype(wide)
    counts = jnp.zeros((bags, 1), jnp.int32).at[bag].add(1, mode="drop")
    if mode == _MAX:
        total = jnp.full((bags, weight.shape[1]), -jnp.inf, wide).at[bag].max(rows, mode="drop")
        total = jnp.where(counts == 0, 0, total)
    else:
        total = jnp.zeros((bags, weight.shape[1]), wide).at[bag].add(rows, mode="drop")
        if mode == _MEAN:
            total = total / jnp.maximum(counts, 1).astype(wide)
    return total, *(jnp.zeros(x.shape, jnp.int64) for x in ctx.out[1:])
