"""Sums, extrema and statistics over dimensions.

bfloat16 and float16 are accumulated in float32 and rounded once; variances take two passes, since
E[x²] − E[x]² loses too many bits.
"""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import torch
from jax import Array, lax

from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import lowers

Dims = int | Sequence[int] | None


def widen(x: Array) -> Array:
    """float16 and bfloat16 as float32, everything else as it is."""
    small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if small else x


def axes(x: Array, dim: Dims) -> tuple[int, ...]:
    """Axes of `x` to reduce; torch means all of them by None and, mostly, by an empty list."""
    if x.ndim == 0 or dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.ndim for d in dims)


def _accumulator(x: Array, dtype: torch.dtype | None, out_dtype: jnp.dtype) -> Array:
    """`x` in the dtype in which it is summed."""
    x = x.astype(to_jax(dtype) if dtype is not None else out_dtype) if _narrower(dtype) else x
    return widen(x.astype(out_dtype) if not jnp.issubdtype(x.dtype, jnp.inexact) else x)


def _narrower(dtype: torch.dtype | None) -> bool:
    """Whether to convert before summing: not when that would only drop bits early."""
    return dtype is not None and not (dtype.is_floating_point and dtype.itemsize < 4)


@lowers("sum.default", "sum.dim_IntList")
def sum_(
    ctx: Context,
    x: Array,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    return jnp.sum(_accumulator(x, dtype, ctx.out_dtype), axes(x, dim), keepdims=keepdim)


@lowers("mean.default")
def mean(ctx: Context, x: Array, *, dtype: torch.dtype | None = None) -> Array:
    return mean_dim(ctx, x, None, dtype=dtype)


@lowers("mean.dim")
def mean_dim(
    ctx: Context,
    x: Array,
    dim: Dims,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    return jnp.mean(_accumulator(x, dtype, ctx.out_dtype), axes(x, dim), keepdims=keepdim)


@lowers("prod.default")
def prod(ctx: Context, x: Array, *, dtype: torch.dtype | None = None) -> Array:
    return jnp.prod(_accumulator(x, dtype, ctx.out_dtype))


@lowers("prod.dim_int")
def prod_dim(
    ctx: Context,
    x: Array,
    dim: int,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    return jnp.prod(_accumulator(x, dtype, ctx.out_dtype), axes(x, dim), keepdims=keepdim)


@lowers("amax.default")
def amax(x: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.max(x, axes(x, dim), keepdims=keepdim)


@lowers("amin.default")
def amin(x: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.min(x, axes(x, dim), keepdims=keepdim)


lowers("max.default")(lambda x: jnp.max(x))
lowers("min.default")(lambda x: jnp.min(x))


@lowers("any.default", "any.dim", "any.dims")
def any_(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.any(x, _axes_or_none(x, dim), keepdims=keepdim)


@lowers("all.default", "all.dim", "all.dims")
def all_(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.all(x, _axes_or_none(x, dim), keepdims=keepdim)


def _axes_or_none(x: Array, dim: Dims) -> tuple[int, ...]:
    """Unlike in other reductions, an empty list of dimensions reduces none."""
    none = dim is not None and not isinstance(dim, int) and len(dim) == 0
    return () if none else axes(x, dim)


lowers("_is_all_true.default")(lambda x: jnp.all(x))
lowers("_is_any_true.default")(lambda x: jnp.any(x))


def variance(x: Array, dim: Dims, correction: float, keepdim: bool) -> tuple[Array, Array]:
    """Variance and mean; NaN or infinity as in torch where there are too few elements."""
    x, over = widen(x), axes(x, dim)
    mean = jnp.mean(x, over, keepdims=True)
    centred = x - mean
    squares = jnp.real(centred * jnp.conj(centred)) if jnp.iscomplexobj(x) else centred * centred
    count = math.prod(x.shape[a] for a in over)
    total = jnp.sum(squares, over, keepdims=keepdim)
    mean = mean if keepdim else jnp.squeeze(mean, over)
    return total / jnp.asarray(max(count - correction, 0), total.dtype), mean


@lowers("var.correction")
def var(
    x: Array,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Array:
    return variance(x, dim, 1 if correction is None else correction, keepdim)[0]


@lowers("std.correction")
def std(
    x: Array,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Array:
    return jnp.sqrt(var(x, dim, correction=correction, keepdim=keepdim))


@lowers("var_mean.correction")
def var_mean(
    x: Array,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Array, Array]:
    return variance(x, dim, 1 if correction is None else correction, keepdim)


@lowers("std_mean.correction")
def std_mean(
    x: Array,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Array, Array]:
    result, mean = variance(x, dim, 1 if correction is None else correction, keepdim)
    return jnp.sqrt(result), mean


def _arg_extreme(fn: Callable[..., Array]) -> Callable[..., Array]:
    def lowering(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        x = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
        if x.ndim == 0:
            return jnp.zeros((), jnp.int64)
        return fn(x, axis=dim, keepdims=keepdim)  # the first NaN wins, in torch and in jax

    return lowering


argmax = lowers("argmax.default")(_arg_extreme(jnp.argmax))
argmin = lowers("argmin.default")(_arg_extreme(jnp.argmin))


@lowers("max.dim")
def max_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    over = axes(x, dim)
    return jnp.max(x, over, keepdims=keepdim), argmax(x, dim, keepdim)


@lowers("min.dim")
def min_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    over = axes(x, dim)
    return jnp.min(x, over, keepdims=keepdim), argmin(x, dim, keepdim)


@lowers("logsumexp.default")
def logsumexp(ctx: Context, x: Array, dim: Dims, keepdim: bool = False) -> Array:
    x, over = (
        widen(x.astype(ctx.out_dtype) if x.dtype.kind in "iub" else x),
        axes(x, dim),
    )
    top = lax.stop_gradient(jnp.max(jnp.real(x), over, keepdims=True, initial=-jnp.inf))
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.log(jnp.sum(jnp.exp(x - top), over, keepdims=keepdim))
    return total + (top if keepdim else jnp.squeeze(top, over))


@lowers("linalg_vector_norm.default")
def vector_norm(
    x: Array,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    x = widen(x.astype(to_jax(dtype)) if dtype is not None else x)
    over = axes(x, dim)
    size = jnp.abs(x)
    if ord == 0:
        return jnp.sum((size != 0).astype(size.dtype), over, keepdims=keepdim)
    if ord == math.inf:
        return jnp.max(size, over, keepdims=keepdim, initial=0)
    if ord == -math.inf:
        return jnp.min(size, over, keepdims=keepdim, initial=math.inf)
    if ord == 1:
        return jnp.sum(size, over, keepdims=keepdim)
    if ord == 2:
        squares = jnp.real(x * jnp.conj(x)) if jnp.iscomplexobj(x) else x * x
        return jnp.sqrt(jnp.sum(squares, over, keepdims=keepdim))
    total = jnp.sum(jnp.power(size, ord), over, keepdims=keepdim)
    return jnp.power(total, 1 / ord)
