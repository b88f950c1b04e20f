"""Conversions between element types, as torch does them on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np


def cast(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts an array to another element type.

    Where XLA and C++ differ, this follows torch on x86: a float that int32 (for 64-bit types and
    uint32: int64) cannot hold becomes the smallest such integer, of which narrower types keep the
    low bits; XLA alone would saturate. A complex number loses its imaginary part.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        if dtype == jnp.bool_:
            return (x.real != 0) | (x.imag != 0)
        x = x.real
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
        return _float_to_int(x, dtype)
    return x.astype(dtype)


def _float_to_int(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    narrow = dtype.itemsize < 4 or dtype == jnp.int32
    wide = jnp.dtype(jnp.int32 if narrow else jnp.int64)
    info = jnp.iinfo(wide)
    if x.dtype.itemsize < 4:
        x = x.astype(jnp.float32)
    bound = np.array(2.0 ** (info.bits - 1), x.dtype)
    inside = (x >= -bound) & (x < bound)
    low = jnp.where(inside, x.astype(wide), wide.type(info.min))
    if dtype == jnp.uint64:
        high = (x >= bound) & (x < bound * 2)
        return jnp.where(high, x.astype(dtype), low.astype(dtype))
    return low.astype(dtype)


def scalar(value: complex | float | int | bool, dtype: jnp.dtype) -> np.ndarray:
    """Returns a Python number as a 0-d constant of exactly this dtype, integers wrapping around."""
    dtype = jnp.dtype(dtype)
    if isinstance(value, complex) and not jnp.issubdtype(dtype, jnp.complexfloating):
        value = value.real
    if jnp.issubdtype(dtype, jnp.integer) and isinstance(value, int):
        value = int(value) & ((1 << 64) - 1)
        return np.array(value, np.uint64).astype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(value).astype(dtype)
