"""The correspondence between torch's and XLA's element types."""

import jax.numpy as jnp
import numpy as np
import torch

_FROM_TORCH = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.uint16: jnp.uint16,
    torch.uint32: jnp.uint32,
    torch.uint64: jnp.uint64,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
}


def is_supported(dtype: torch.dtype) -> bool:
    """Returns whether XLA has an element type for `dtype` (complex32 and quantized types: no)."""
    return dtype in _FROM_TORCH


def to_jax(dtype: torch.dtype) -> jnp.dtype:
    """Returns the XLA element type of a torch dtype.

    Raises:
        KeyError: XLA has none; ask `is_supported` first.
    """
    return jnp.dtype(_FROM_TORCH[dtype])


def accumulation_dtype(dtype: np.dtype | str) -> np.dtype:
    """The dtype in which sums of `dtype`, or of products, are kept: float32 for small floats."""
    dtype = jnp.dtype(dtype)
    small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if small else dtype
