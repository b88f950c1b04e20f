"""Sorting and searching, with torch's order: NaN is larger than every number."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.lowering.registry import lowers

Pair = tuple[jax.Array, jax.Array]


def _sort(self: jax.Array, dim: int, descending: bool) -> Pair:
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)
    # Reversed before and after, so that equal elements keep their order when descending.
    keys = jnp.flip(self, dim) if descending else self
    if jnp.issubdtype(keys.dtype, jnp.floating):
        keys = jnp.where(jnp.isnan(keys), jnp.nan, keys)  # XLA's order puts NaNs with a sign first
    dim = dim % self.ndim
    places = lax.broadcasted_iota(jnp.int64, self.shape, dim)
    if descending:
        places = self.shape[dim] - 1 - places
    values, places = lax.sort((keys, places), dimension=dim, is_stable=True, num_keys=1)
    if descending:
        values, places = jnp.flip(values, dim), jnp.flip(places, dim)
    if jnp.issubdtype(self.dtype, jnp.floating):
        values = jnp.take_along_axis(self, places, dim, mode="clip")  # keeps the sign of zeros
    return values, places


@lowers("sort.default")
def sort(self: jax.Array, dim: int = -1, descending: bool = False) -> Pair:
    return _sort(self, dim, descending)


@lowers("sort.stable")
def sort_stable(
    self: jax.Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> Pair:
    return _sort(self, dim, descending)


@lowers("argsort.default")
def argsort(self: jax.Array, dim: int = -1, descending: bool = False) -> jax.Array:
    return _sort(self, dim, descending)[1]


@lowers("argsort.stable")
def argsort_stable(
    self: jax.Array, *, stable: bool, dim: int = -1, descending: bool = False
) -> jax.Array:
    return _sort(self, dim, descending)[1]


@lowers("msort.default")
def msort(self: jax.Array) -> jax.Array:
    return _sort(self, 0, False)[0]


@lowers("topk.default")
def topk(self: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Pair:
    """The k largest or smallest, always sorted; equal elements in their order."""
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)
    values, places = _sort(self, dim, largest)
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


@lowers("searchsorted.Tensor", "searchsorted.Scalar")
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


@lowers("bucketize.Tensor", "bucketize.Scalar")
def bucketize(
    self: Any, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    sequence, values = _comparable(boundaries, self)
    return _search(sequence, values, right)
