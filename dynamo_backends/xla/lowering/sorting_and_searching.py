"""Sorting, searching and order statistics, with torch's order: NaN is larger than every number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamo_backends.xla.lowering.registry import register_lowering

Pair = tuple[jax.Array, jax.Array]

_NAN = np.float32("nan")
_SELECTION = 8  # selecting beats sorting if no more than one element in so many is wanted


def _ordered(x: jax.Array) -> jax.Array:
    """Numbers as signed integers in the same order; NaN last, both zeros equal.

    It works on the bits, for XLA's CPU code compares numbers near zero as if they were zero.
    """
    if x.dtype == jnp.uint64:
        return lax.bitcast_convert_type(x ^ jnp.uint64(1 << 63), jnp.int64)
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x ^ jnp.uint32(1 << 31), jnp.int32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int64 if x.dtype == jnp.int64 else jnp.int32)
    integer = jnp.int64 if x.dtype == jnp.float64 else jnp.int32
    top = jnp.iinfo(integer).max
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, integer)
    key = jnp.where(bits < 0, -(bits & top), bits)
    return jnp.where(jnp.isnan(x), top, key)


def _order(self: jax.Array, dim: int, descending: bool) -> jax.Array:
    """Returns where the sorted elements come from; equal ones in their order."""
    places = lax.broadcasted_iota(jnp.int64, self.shape, dim)
    key = ~_ordered(self) if descending else _ordered(self)
    if key.dtype == jnp.int32 and self.shape[dim] < 1 << 32:
        # One integer of key and place per element: XLA sorts these several times as fast as pairs.
        packed = (key.astype(jnp.int64) << 32) | places
        return lax.sort(packed, dimension=dim, is_stable=False) & 0xFFFFFFFF
    return lax.sort((key, places), dimension=dim, is_stable=True, num_keys=1)[1]


@register_lowering("sort.default", "sort.stable")
def sort(
    self: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> Pair:
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)
    places = _order(self, dim % self.ndim, descending)
    return jnp.take_along_axis(self, places, dim, mode="clip"), places


@register_lowering("argsort.default", "argsort.stable")
def argsort(
    self: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> jax.Array:
    return sort(self, dim, descending)[1]


@register_lowering("msort.default")
def msort(self: jax.Array) -> jax.Array:
    return sort(self, 0)[0]


@register_lowering("topk.default")
def topk(self: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Pair:
    """Returns the k largest or smallest, always sorted; equal elements in their order."""
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)
    floating = jnp.issubdtype(self.dtype, jnp.floating)
    exact_in_float32 = self.dtype.itemsize <= (4 if floating else 2)
    if exact_in_float32 and k * _SELECTION <= self.shape[dim]:
        keys = jnp.moveaxis(self, dim, -1).astype(jnp.float32)
        nan = jnp.isnan(keys)
        # Sign bits are chosen so that NaN is the largest number in XLA's order, or its negative.
        keys = jnp.where(nan, jnp.nan, keys) if largest else jnp.where(nan, -_NAN, -keys)
        places = jnp.moveaxis(lax.top_k(keys, k)[1], -1, dim).astype(jnp.int64)
        return jnp.take_along_axis(self, places, dim, mode="clip"), places
    values, places = sort(self, dim, largest)
    return (
        lax.slice_in_dim(values, 0, k, axis=dim),
        lax.slice_in_dim(places, 0, k, axis=dim),
    )


def _search(sequence: jax.Array, values: jax.Array, right: bool) -> jax.Array:
    """Binary search as torch's kernel does it, all values at once.

    Args:
        sequence: (n,), or (*rows, n).
        values: Any shape, or (*rows, m).
        right: Find the place after equal elements.
    """
    size = sequence.shape[-1]
    low = jnp.zeros(values.shape, jnp.int64)
    high = jnp.full(values.shape, size, jnp.int64)
    for _ in range(size.bit_length()):
        middle = (low + high) // 2
        if sequence.ndim == 1:
            probe = jnp.take(sequence, middle, mode="clip")
        else:
            probe = jnp.take_along_axis(sequence, middle, -1, mode="clip")
        beyond = probe > values if right else probe >= values
        searching = low < high
        low, high = (
            jnp.where(searching & ~beyond, middle + 1, low),
            jnp.where(searching & beyond, middle, high),
        )
    return low


def _comparable(x: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    x, y = jnp.asarray(x), jnp.asarray(y)
    if x.dtype != y.dtype:
        floating = any(jnp.issubdtype(a.dtype, jnp.floating) for a in (x, y))
        dtype = jnp.float64 if floating else jnp.int64
        x, y = x.astype(dtype), y.astype(dtype)
    return x, y


@register_lowering("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    sorted_sequence: jax.Array,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1, mode="clip")
    sequence, values = _comparable(sorted_sequence, self)
    return _search(sequence, values, right or side == "right")


@register_lowering("bucketize.Tensor", "bucketize.Scalar")
def bucketize(
    self: Any, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    sequence, values = _comparable(boundaries, self)
    return _search(sequence, values, right)


_Pair = tuple[Array, Array]


def _sorted(x: Array, dim: int) -> _Pair:
    """Values in ascending order, NaN last, and their indices."""
    index = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    return tuple(lax.sort((x, index), dimension=dim, is_stable=True, num_keys=1))  # type: ignore[return-value]


def _at(pair: _Pair, position: Array, dim: int, keepdim: bool) -> _Pair:
    """Values and indices at a position (which has length 1 along `dim`)."""
    values, indices = (jnp.take_along_axis(a, position, axis=dim) for a in pair)
    if keepdim:
        return values, indices
    return jnp.squeeze(values, dim), jnp.squeeze(indices, dim)


def _scalar(x: Array) -> _Pair:
    return x, jnp.zeros((), jnp.int64)


@register_lowering("kthvalue.default")
def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> _Pair:
    if x.ndim == 0:
        return _scalar(x)
    dim %= x.ndim
    values, indices = (lax.index_in_dim(a, k - 1, dim, keepdim) for a in _sorted(x, dim))
    return values, indices


def _nans(x: Array, dim: int) -> Array:
    """Number of NaN along a dimension, which is kept."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]), jnp.int64)
    return jnp.sum(jnp.isnan(x), dim, keepdims=True, dtype=jnp.int64)


@register_lowering("median.dim")
def median_dim(x: Array, dim: int, keepdim: bool = False) -> _Pair:
    """Returns the lower one of two medians; the first NaN where there is any."""
    if x.ndim == 0:
        return _scalar(x)
    dim %= x.ndim
    length, nans = x.shape[dim], _nans(x, dim)
    position = jnp.where(nans > 0, length - nans, (length - 1) // 2)
    return _at(_sorted(x, dim), position, dim, keepdim)


@register_lowering("nanmedian.dim")
def nanmedian_dim(x: Array, dim: int, keepdim: bool = False) -> _Pair:
    """Returns the lower one of the medians of what is not NaN."""
    if x.ndim == 0:
        return _scalar(x)
    dim %= x.ndim
    position = jnp.maximum(x.shape[dim] - _nans(x, dim) - 1, 0) // 2
    return _at(_sorted(x, dim), position, dim, keepdim)


def _empty_median(x: Array) -> Array:
    return jnp.full((), jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype)


@register_lowering("median.default")
def median(x: Array) -> Array:
    return median_dim(x.reshape(-1), 0)[0] if x.size else _empty_median(x)


@register_lowering("nanmedian.default")
def nanmedian(x: Array) -> Array:
    return nanmedian_dim(x.reshape(-1), 0)[0] if x.size else _empty_median(x)


@register_lowering("mode.default")
def mode(x: Array, dim: int = -1, keepdim: bool = False) -> _Pair:
    """Returns the smallest of the most frequent values: the first longest run after sorting."""
    if x.ndim == 0:
        return _scalar(x)
    dim %= x.ndim
    pair = _sorted(x, dim)
    values = pair[0]
    place = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    previous = jnp.roll(values, 1, dim)
    run_start = lax.cummax(jnp.where((place == 0) | (values != previous), place, 0), axis=dim)
    end_of_longest = jnp.argmax(place - run_start, dim, keepdims=True)
    return _at(pair, end_of_longest, dim, keepdim)
