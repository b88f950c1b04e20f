"""Discrete Fourier transforms."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from dynamo_backends.xla.lowering.registry import lowers

_BY_ROOT_N, _BY_N = 1, 2  # at::native::fft_norm_mode; 0 is none


def _scaled(x: Array, length: int, normalization: int) -> Array:
    if normalization == _BY_ROOT_N:
        return x / jnp.asarray(math.sqrt(length), x.real.dtype)
    return x / jnp.asarray(length, x.real.dtype) if normalization == _BY_N else x


def _length(x: Array, dim: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dim)


def _transform(x: Array, dim: Sequence[int], forward: bool) -> Array:
    """Unscaled complex transforms, one dimension after the other (XLA takes three at most)."""
    for d in dim:
        x = jnp.fft.fft(x, axis=d) if forward else jnp.fft.ifft(x, axis=d, norm="forward")
    return x


@lowers("_fft_c2c.default")
def fft_c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    return _scaled(_transform(x, dim, forward), _length(x, dim), normalization)


@lowers("_fft_r2c.default")
def fft_r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """The last of `dim` is the one that is halved if `onesided`."""
    first = jnp.fft.rfft if onesided else jnp.fft.fft
    out = _transform(first(x, axis=dim[-1]), dim[:-1], True)
    return _scaled(out, _length(x, dim), normalization)


@lowers("_fft_c2r.default")
def fft_c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """The last of `dim` holds the non-negative frequencies of a real signal."""
    x = _transform(x, dim[:-1], False)
    out = jnp.fft.irfft(x, n=last_dim_size, axis=dim[-1], norm="forward")
    return _scaled(out, _length(out, dim), normalization)
