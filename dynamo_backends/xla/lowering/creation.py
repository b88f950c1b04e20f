"""Makes tensors out of numbers, and converts between element types."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import (
    Promotion,
    by_name,
    register_lowering,
    register_pointwise,
)
from dynamo_backends.xla.lowering.values import cast, scalar


def _moves_between_devices(node: fx.Node) -> str | None:
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    origin, target = source.meta["val"].device.type, node.meta["val"].device.type
    return None if origin == target else f"it copies from {origin} to {target}"


@register_pointwise("_to_copy.default", promote=Promotion.NONE, when=_moves_between_devices)
def to_copy(ctx: Context, self: jax.Array, **kwargs: Any) -> jax.Array:
    return cast(self, ctx.out_dtype)


@register_pointwise("prims::convert_element_type.default", promote=Promotion.NONE)
def convert_element_type(ctx: Context, a: jax.Array, dtype: Any) -> jax.Array:
    return cast(a, ctx.out_dtype)


@register_pointwise(
    "prims::device_put.default", promote=Promotion.NONE, when=_moves_between_devices
)
def device_put(a: jax.Array, device: Any, non_blocking: bool = False) -> jax.Array:
    return a


@register_pointwise("copy.default", promote=Promotion.NONE)
def copy(self: jax.Array, src: jax.Array, non_blocking: bool = False) -> jax.Array:
    return cast(jnp.broadcast_to(src, self.shape), self.dtype)


@register_lowering("full.default", "new_full.default", "prims::full.default")
@by_name
def full(ctx: Context, fill_value: Any) -> jax.Array:
    return jnp.full(ctx.out.shape, scalar(fill_value, ctx.out_dtype))


@register_pointwise("full_like.default", "prims::full_like.default", promote=Promotion.NONE)
def full_like(ctx: Context, self: jax.Array, fill_value: Any, **kwargs: Any) -> jax.Array:
    return jnp.full(self.shape, scalar(fill_value, ctx.out_dtype))


@register_pointwise("fill.Scalar", promote=Promotion.NONE)
def fill_scalar(self: jax.Array, value: Any) -> jax.Array:
    return jnp.full(self.shape, scalar(value, self.dtype))


@register_pointwise("fill.Tensor", promote=Promotion.NONE)
def fill_tensor(self: jax.Array, value: jax.Array) -> jax.Array:
    return cast(jnp.broadcast_to(value.reshape((1,) * self.ndim), self.shape), self.dtype)


@register_lowering(
    "zeros.default",
    "empty.memory_format",
    "empty.default",
    "empty_strided.default",
    "prims::empty_strided.default",
    "prims::empty_permuted.default",
    "empty_permuted.default",
    "new_zeros.default",
    "new_empty.default",
    "new_empty_strided.default",
)
def zeros(ctx: Context, *args: Any, **kwargs: Any) -> jax.Array:
    """Zeros; also for uninitialised memory, so that a run can be repeated."""
    return jnp.zeros(ctx.out.shape, ctx.out_dtype)


@register_pointwise("zeros_like.default", "empty_like.default", promote=Promotion.NONE)
def zeros_like(ctx: Context, self: jax.Array, **kwargs: Any) -> jax.Array:
    return jnp.zeros(self.shape, ctx.out_dtype)


@register_pointwise("zero.default", promote=Promotion.NONE)
def zero(self: jax.Array) -> jax.Array:
    return jnp.zeros_like(self)


@register_lowering("ones.default", "new_ones.default")
def ones(ctx: Context, *args: Any, **kwargs: Any) -> jax.Array:
    return jnp.ones(ctx.out.shape, ctx.out_dtype)


@register_pointwise("ones_like.default", promote=Promotion.NONE)
def ones_like(ctx: Context, self: jax.Array, **kwargs: Any) -> jax.Array:
    return jnp.ones(self.shape, ctx.out_dtype)


@register_lowering("scalar_tensor.default", "prims::scalar_tensor.default")
def scalar_tensor(ctx: Context, s: Any, **kwargs: Any) -> jax.Array:
    return jnp.asarray(scalar(s, ctx.out_dtype))


@register_lowering("arange.default", "arange.start", "arange.start_step", "prims::iota.default")
@by_name
def arange(ctx: Context, start: Any = 0, step: Any = 1) -> jax.Array:
    length, dtype = ctx.out.shape[0], ctx.out_dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return lax.iota(jnp.int64, length) * int(step) + int(start)
    # torch's CPU kernel counts in double precision and rounds each element once.
    return lax.iota(jnp.float64, length) * float(step) + float(start)


def _integer_ends(node: fx.Node) -> str | None:
    if node.meta["val"].dtype.is_floating_point or node.meta["val"].dtype.is_complex:
        return None
    return "integers between tensor bounds depend on how a float product is rounded"


@register_lowering("linspace.default")
def linspace(ctx: Context, start: Any, end: Any, steps: int, **kwargs: Any) -> jax.Array:
    """Evenly spaced numbers, counted from both ends to the middle as torch's kernel does.

    Integers are truncated: they come from numpy, because XLA may fuse product and sum into one
    rounding, and a number just below an integer would become that integer.
    """
    dtype = ctx.out_dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        return linspace_between_tensors(ctx, start, end, steps)
    first, last = scalar(start, dtype).item(), scalar(end, dtype).item()
    distance = (last - first) / (steps - 1) if steps > 1 else 0.0
    places = np.arange(steps)
    values = np.where(
        places < steps // 2, first + distance * places, last - distance * (steps - places - 1)
    )
    return jnp.asarray(values.astype(dtype) if steps != 1 else np.array([first], dtype))


@register_lowering(
    "linspace.Tensor_Tensor",
    "linspace.Tensor_Scalar",
    "linspace.Scalar_Tensor",
    when=_integer_ends,
)
def linspace_between_tensors(
    ctx: Context, start: Any, end: Any, steps: int, **kwargs: Any
) -> jax.Array:
    wide = accumulation_dtype(ctx.out_dtype)
    if not jnp.issubdtype(wide, jnp.inexact):
        raise ctx.refuse(str(_integer_ends(ctx.node)))
    first, last = (
        cast(x, wide) if isinstance(x, jax.Array) else jnp.asarray(scalar(x, wide))
        for x in (start, end)
    )
    if steps < 2:
        return jnp.full((steps,), first)
    distance = (last - first) / (steps - 1)
    places = lax.iota(jnp.int32, steps)
    from_first = first + distance * places.astype(wide)
    from_last = last - distance * (steps - 1 - places).astype(wide)
    return jnp.where(places < steps // 2, from_first, from_last)


@register_lowering("eye.default", "eye.m")
def eye(ctx: Context, *args: Any, **kwargs: Any) -> jax.Array:
    rows, columns = ctx.out.shape
    return jnp.eye(rows, columns, dtype=ctx.out_dtype)


@register_lowering("tril.default")
def tril(self: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.tril(self, diagonal)


@register_lowering("triu.default")
def triu(self: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.triu(self, diagonal)


@register_lowering("tril_indices.default")
def tril_indices(ctx: Context, row: int, col: int, offset: int = 0, **kwargs: Any) -> jax.Array:
    return jnp.stack(jnp.tril_indices(row, offset, col)).reshape(ctx.out.shape)


@register_lowering("triu_indices.default")
def triu_indices(ctx: Context, row: int, col: int, offset: int = 0, **kwargs: Any) -> jax.Array:
    return jnp.stack(jnp.triu_indices(row, offset, col)).reshape(ctx.out.shape)
