"""Helpers for lowerings registered with `Layout.RAW`: one program for both ways of storing."""

import jax

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.values import ChannelsLast, Value, channels_last, logical


def storage(x: Value) -> jax.Array:
    """Returns the array as it is stored, whichever way that is."""
    return x.array if isinstance(x, ChannelsLast) else x


def stored_like(x: Value, array: jax.Array) -> Value:
    """Wraps a result whose dimensions are in the order of `storage(x)`."""
    return ChannelsLast(array) if isinstance(x, ChannelsLast) else array


def stored_axis(x: Value, dim: int) -> int:
    """Returns where torch's dimension `dim` (it may be negative) lies in `storage(x)`."""
    dim = dim % x.ndim
    if not isinstance(x, ChannelsLast) or dim == 0:
        return dim
    return x.ndim - 1 if dim == 1 else dim - 1


def wants_channels_last(ctx: Context, x: Value) -> bool:
    """Whether the result of a convolution or pooling of `x` is to be stored channels last."""
    return ctx.options.channels_last or isinstance(x, ChannelsLast)


def finish_channels_last(ctx: Context, x: Value, array: jax.Array) -> Value:
    """Hands on an array (N, *spatial, C) computed from `x`, in the layout that the graph uses."""
    value = ChannelsLast(array)
    return value if wants_channels_last(ctx, x) else logical(value)


def batched_channels_last(x: Value, spatial: int) -> tuple[jax.Array, bool]:
    """The array (N, *spatial, C) of a batched or unbatched image, and whether it was batched.

    Args:
        x: A tensor (N, C, *spatial) or (C, *spatial).
        spatial: Number of spatial dimensions.
    """
    if x.ndim == spatial + 2:
        return channels_last(x), True
    return channels_last(logical(x)[None]), False


def unbatched(ctx: Context, x: Value, array: jax.Array, batched: bool) -> Value:
    """Undoes `batched_channels_last` on a result (N, *spatial, C)."""
    if batched:
        return finish_channels_last(ctx, x, array)
    return logical(ChannelsLast(array))[0]
