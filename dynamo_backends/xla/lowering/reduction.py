"""Sums, extrema and statistics over dimensions, and cumulative operators.

bfloat16 and float16 are accumulated in float32 and rounded once; variances take two passes, since
E[x²] − E[x]² loses too many bits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import fx

from dynamo_backends.xla.dtypes import accumulation_dtype, to_jax
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import register_lowering

Dims = int | Sequence[int] | None


def widen(x: Array) -> Array:
    """float16 and bfloat16 as float32, everything else as it is."""
    return x.astype(accumulation_dtype(x.dtype))


def axes(x: Array, dim: Dims) -> tuple[int, ...]:
    """Normalises torch's `dim` argument to the axes to reduce."""
    if x.ndim == 0 or dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.ndim for d in dims)


def _accumulator(x: Array, dtype: torch.dtype | None, out_dtype: jnp.dtype) -> Array:
    """`x` in the dtype in which it is summed."""
    x = x.astype(to_jax(dtype) if dtype is not None else out_dtype) if _narrower(dtype) else x
    return widen(x.astype(out_dtype) if not jnp.issubdtype(x.dtype, jnp.inexact) else x)


def _narrower(dtype: torch.dtype | None) -> bool:
    """Returns whether to convert before summing: not when that would only drop bits early."""
    return dtype is not None and not (dtype.is_floating_point and dtype.itemsize < 4)


@register_lowering("sum.default", "sum.dim_IntList")
def sum_(
    ctx: Context,
    x: Array,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    return jnp.sum(_accumulator(x, dtype, ctx.out_dtype), axes(x, dim), keepdims=keepdim)


@register_lowering("mean.default", "mean.dim")
def mean(
    ctx: Context,
    x: Array,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    return jnp.mean(_accumulator(x, dtype, ctx.out_dtype), axes(x, dim), keepdims=keepdim)


@register_lowering("prod.default", "prod.dim_int")
def prod(
    ctx: Context,
    x: Array,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    return jnp.prod(_accumulator(x, dtype, ctx.out_dtype), axes(x, dim), keepdims=keepdim)


def _axes_or_none(x: Array, dim: Dims) -> tuple[int, ...]:
    """Unlike in other reductions, an empty list of dimensions reduces none."""
    none = dim is not None and not isinstance(dim, int) and len(dim) == 0
    return () if none else axes(x, dim)


def _reducing(
    fn: Callable[..., Array], over: Callable[[Array, Dims], tuple[int, ...]] = axes
) -> Callable[..., Array]:
    def lowering(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
        return fn(x, over(x, dim), keepdims=keepdim)

    return lowering


register_lowering("any.default", "any.dim", "any.dims", "_is_any_true.default")(
    _reducing(jnp.any, _axes_or_none)
)
register_lowering("all.default", "all.dim", "all.dims", "_is_all_true.default")(
    _reducing(jnp.all, _axes_or_none)
)


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


def standardised(x: Array, over: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    """Normalised values, mean and 1/std over some axes, which are kept with length 1.

    What the mean was rounded by is taken off, too: where all values are equal, 1/std is large, and
    eager's differences from the mean are 0. It is found in the pass that sums the squares.
    """
    mean = jnp.mean(x, over, keepdims=True)
    centred = x - mean
    rest = jnp.mean(centred, over, keepdims=True)
    # Where squares overflow, the variance is infinite and values are 0, as in eager.
    finite = jnp.minimum(jnp.square(rest), jnp.finfo(x.dtype).max)
    variance = jnp.mean(jnp.square(centred), over, keepdims=True) - finite
    rstd = lax.rsqrt(jnp.maximum(variance, 0) + eps)
    return (centred - rest) * rstd, mean + rest, rstd


def _statistic(pick: Callable[[Array, Array], Any]) -> Callable[..., Any]:
    def lowering(
        x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        return pick(*variance(x, dim, 1 if correction is None else correction, keepdim))

    return lowering


register_lowering("var.correction")(_statistic(lambda var, mean: var))
register_lowering("std.correction")(_statistic(lambda var, mean: jnp.sqrt(var)))
register_lowering("var_mean.correction")(_statistic(lambda var, mean: (var, mean)))
register_lowering("std_mean.correction")(_statistic(lambda var, mean: (jnp.sqrt(var), mean)))


def _arg_extreme(fn: Callable[..., Array]) -> Callable[..., Array]:
    def lowering(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        x = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
        if x.ndim == 0:
            return jnp.zeros((), jnp.int64)
        return fn(x, axis=dim, keepdims=keepdim)  # the first NaN wins, in torch and in jax

    return lowering


def _register_extreme(name: str, fn: Callable[..., Array], place: Callable[..., Array]) -> None:
    extreme = register_lowering(f"{name}.default", f"a{name}.default")(_reducing(fn))
    where = register_lowering(f"arg{name}.default")(_arg_extreme(place))

    @register_lowering(f"{name}.dim")
    def with_place(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        return extreme(x, dim, keepdim), where(x, dim, keepdim)


_register_extreme("max", jnp.max, jnp.argmax)
_register_extreme("min", jnp.min, jnp.argmin)


def subtract_max(x: Array, top: Array) -> Array:
    """Returns `x - top` for the maximum `top`, safe against excess precision in fusions.

    XLA would take x, if that is a product, into one operation with the difference, and not round
    it: what it was rounded by is more than exp can take where x is large. The minimum prevents it.
    """
    return (x if jnp.iscomplexobj(x) else jnp.minimum(x, top)) - top


@register_lowering("logsumexp.default")
def logsumexp(ctx: Context, x: Array, dim: Dims, keepdim: bool = False) -> Array:
    x, over = (
        widen(x.astype(ctx.out_dtype) if x.dtype.kind in "iub" else x),
        axes(x, dim),
    )
    top = jnp.max(jnp.real(x), over, keepdims=True, initial=-jnp.inf)
    finite = jnp.isfinite(top)
    shifted = jnp.where(finite, subtract_max(x, top), x)
    top = jnp.where(finite, top, 0)
    total = jnp.log(jnp.sum(jnp.exp(shifted), over, keepdims=keepdim))
    return total + (top if keepdim else jnp.squeeze(top, over))


@register_lowering("linalg_vector_norm.default")
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
        if jnp.iscomplexobj(x):
            return jnp.sqrt(jnp.sum(jnp.real(x * jnp.conj(x)), over, keepdims=keepdim))
        if math.prod(x.shape[a] for a in over) == 1:  # as eager: squares of others overflow
            return jnp.sum(size, over, keepdims=keepdim)
        return jnp.sqrt(jnp.sum(size * size, over, keepdims=keepdim))
    total = jnp.sum(jnp.power(size, ord), over, keepdims=keepdim)
    return jnp.power(total, 1 / ord)


def _prepared(ctx: Context, x: Array, dtype: torch.dtype | None) -> Array:
    return widen(x.astype(to_jax(dtype) if dtype is not None else ctx.out_dtype))


@register_lowering("cumsum.default")
def cumsum(ctx: Context, x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    x = _prepared(ctx, x, dtype)
    return jnp.cumsum(x, dim) if x.ndim else x


@register_lowering("cumprod.default")
def cumprod(ctx: Context, x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    x = _prepared(ctx, x, dtype)
    return jnp.cumprod(x, dim) if x.ndim else x


def _running_extreme(
    x: Array, dim: int, keeps: Callable[[Array, Array], Array]
) -> tuple[Array, Array]:
    """The extreme so far and where it was last seen; once NaN, always NaN."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    index = lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim)

    def later_wins(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
        take = keeps(late[0], early[0])
        if jnp.issubdtype(x.dtype, jnp.floating):
            take = jnp.isnan(late[0]) | (take & ~jnp.isnan(early[0]))
        return tuple(jnp.where(take, b, a) for a, b in zip(early, late, strict=True))  # type: ignore[return-value]

    return lax.associative_scan(later_wins, (x, index), axis=dim % x.ndim)


@register_lowering("cummax.default")
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    return _running_extreme(x, dim, jnp.greater_equal)


@register_lowering("cummin.default")
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    return _running_extreme(x, dim, jnp.less_equal)


def _branch_is_open(node: fx.Node) -> str | None:
    if node.meta["val"].is_complex():
        return "the branch of a complex logarithm depends on the order of summation"
    return None


@register_lowering("logcumsumexp.default", when=_branch_is_open)
def logcumsumexp(x: Array, dim: int) -> Array:
    x = widen(x)
    return lax.associative_scan(jnp.logaddexp, x, axis=dim % x.ndim) if x.ndim else x
