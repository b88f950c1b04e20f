"""Complex numbers: parts, construction and views; discrete Fourier transforms."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from dynamo_backends.xla.lowering.registry import Promotion, register_lowering, register_pointwise


@register_pointwise(
    "_conj.default",
    "conj_physical.default",
    "_conj_physical.default",
    "_conj_copy.default",
)
def conj(x: Array) -> Array:
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


register_pointwise("_neg_view.default", "_neg_view_copy.default")(lambda x: -x)
register_pointwise("resolve_conj.default", "resolve_neg.default")(lambda x: x)


@register_pointwise("angle.default", promote=Promotion.COMPLEX_TO_FLOAT)
def angle(x: Array) -> Array:
    """0 or pi for real numbers, NaN for NaN."""
    if jnp.iscomplexobj(x):
        return jnp.arctan2(jnp.imag(x), jnp.real(x))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float32)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0).astype(x.dtype))


register_lowering("real.default")(lambda x: jnp.real(x))
register_lowering("imag.default")(lambda x: jnp.imag(x))


@register_lowering("complex.default")
def complex_(real: Array, imag: Array) -> Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@register_lowering("polar.default")
def polar(abs: Array, angle: Array) -> Array:
    return complex_(abs * jnp.cos(angle), abs * jnp.sin(angle))


@register_lowering("view_as_real.default", "view_as_real_copy.default")
def view_as_real(x: Array) -> Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@register_lowering("view_as_complex.default", "view_as_complex_copy.default")
def view_as_complex(x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


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


@register_lowering("_fft_c2c.default")
def fft_c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    return _scaled(_transform(x, dim, forward), _length(x, dim), normalization)


@register_lowering("_fft_r2c.default")
def fft_r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """The last of `dim` is the one that is halved if `onesided`."""
    first = jnp.fft.rfft if onesided else jnp.fft.fft
    out = _transform(first(x, axis=dim[-1]), dim[:-1], True)
    return _scaled(out, _length(x, dim), normalization)


@register_lowering("_fft_c2r.default")
def fft_c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """The last of `dim` holds the non-negative frequencies of a real signal."""
    x = _transform(x, dim[:-1], False)
    out = jnp.fft.irfft(x, n=last_dim_size, axis=dim[-1], norm="forward")
    return _scaled(out, _length(out, dim), normalization)
