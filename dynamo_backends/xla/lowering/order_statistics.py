"""Medians, the k-th smallest value and the most frequent one.

Among equal values torch leaves open whose index is returned; here it is the first (for `mode` the
last), which is what torch gives for short rows.
"""

import jax.numpy as jnp
from jax import Array, lax

from dynamo_backends.xla.lowering.registry import lowers

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


@lowers("kthvalue.default")
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


@lowers("median.dim")
def median_dim(x: Array, dim: int, keepdim: bool = False) -> _Pair:
    """Returns the lower one of two medians; the first NaN where there is any."""
    if x.ndim == 0:
        return _scalar(x)
    dim %= x.ndim
    length, nans = x.shape[dim], _nans(x, dim)
    position = jnp.where(nans > 0, length - nans, (length - 1) // 2)
    return _at(_sorted(x, dim), position, dim, keepdim)


@lowers("nanmedian.dim")
def nanmedian_dim(x: Array, dim: int, keepdim: bool = False) -> _Pair:
    """Returns the lower one of the medians of what is not NaN."""
    if x.ndim == 0:
        return _scalar(x)
    dim %= x.ndim
    position = jnp.maximum(x.shape[dim] - _nans(x, dim) - 1, 0) // 2
    return _at(_sorted(x, dim), position, dim, keepdim)


def _empty_median(x: Array) -> Array:
    return jnp.full((), jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype)


@lowers("median.default")
def median(x: Array) -> Array:
    return median_dim(x.reshape(-1), 0)[0] if x.size else _empty_median(x)


@lowers("nanmedian.default")
def nanmedian(x: Array) -> Array:
    return nanmedian_dim(x.reshape(-1), 0)[0] if x.size else _empty_median(x)


@lowers("mode.default")
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
