"""Values that the lowering passes along, in either memory layout, and torch's conversions."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynamo_backends.xla.lowering.context import Context


@dataclass(frozen=True)
class ChannelsLast:
    """A tensor of torch shape (N, C, *spatial) that is stored as an array (N, *spatial, C)."""

    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that torch sees."""
        batch, *spatial, channels = self.array.shape
        return (batch, channels, *spatial)

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions."""
        return self.array.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """Element type."""
        return self.array.dtype


@dataclass(frozen=True)
class Flat:
    """A tensor that is stored as an array of one dimension.

    Attributes:
        array: The elements as they lie in memory.
        shape: The shape that torch sees.
        order: Its dimensions as they lie in memory, outermost first.
    """

    array: jax.Array
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        """Insists on the number of elements."""
        if self.array.shape != (math.prod(self.shape),):
            raise ValueError(
                f"an array of shape {self.array.shape} does not have the {math.prod(self.shape)} "
                f"elements of shape {self.shape} in one dimension"
            )

    @property
    def ndim(self) -> int:
        """Number of dimensions that torch sees."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Element type."""
        return self.array.dtype


Value = jax.Array | ChannelsLast
"""What lowerings are given and return; `Flat` stays with the interpreter."""


def to_logical_array(value: Any) -> Any:
    """Converts a value in any layout to an array in torch's dimension order."""
    if isinstance(value, ChannelsLast):
        return jnp.moveaxis(value.array, -1, 1)
    if isinstance(value, Flat):
        dense = value.array.reshape([value.shape[d] for d in value.order])
        return jnp.transpose(dense, sorted(range(value.ndim), key=value.order.__getitem__))
    return value


def to_flat_array(value: Value | Flat, order: tuple[int, ...]) -> jax.Array:
    """Converts a value to a 1-d array of its elements in memory order `order`."""
    if isinstance(value, Flat) and value.order == order:
        return value.array
    return jnp.transpose(to_logical_array(value), order).reshape(-1)


def channels_last(value: Value) -> jax.Array:
    """Returns the array (N, *spatial, C) of a tensor with at least three dimensions."""
    if isinstance(value, ChannelsLast):
        return value.array
    return jnp.moveaxis(value, 1, -1)


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


def stored_array(x: Value) -> jax.Array:
    """Returns the array of a value in the layout that it is stored in."""
    return x.array if isinstance(x, ChannelsLast) else x


def wrap_in_layout_of(x: Value, array: jax.Array) -> Value:
    """Wraps a result array in the same layout as `x`."""
    return ChannelsLast(array) if isinstance(x, ChannelsLast) else array


def stored_axis(x: Value, dim: int) -> int:
    """Returns where torch's dimension `dim` (it may be negative) lies in `storage(x)`."""
    dim = dim % x.ndim
    if not isinstance(x, ChannelsLast) or dim == 0:
        return dim
    return x.ndim - 1 if dim == 1 else dim - 1


def wants_channels_last(ctx: Context, x: Value) -> bool:
    """Returns whether the result of a convolution or pooling is stored channels last."""
    return ctx.options.channels_last or isinstance(x, ChannelsLast)


def wrap_channels_last(ctx: Context, x: Value, array: jax.Array) -> Value:
    """Converts an (N, *spatial, C) array to the layout that the graph uses."""
    value = ChannelsLast(array)
    return value if wants_channels_last(ctx, x) else to_logical_array(value)


def batched_channels_last(x: Value, spatial: int) -> tuple[jax.Array, bool]:
    """The array (N, *spatial, C) of a batched or unbatched image, and whether it was batched.

    Args:
        x: A tensor (N, C, *spatial) or (C, *spatial).
        spatial: Number of spatial dimensions.
    """
    if x.ndim == spatial + 2:
        return channels_last(x), True
    return channels_last(to_logical_array(x)[None]), False


def unbatched(ctx: Context, x: Value, array: jax.Array, batched: bool) -> Value:
    """Removes the batch dimension that `batched_channels_last` added, if it did."""
    if batched:
        return wrap_channels_last(ctx, x, array)
    return to_logical_array(ChannelsLast(array))[0]
