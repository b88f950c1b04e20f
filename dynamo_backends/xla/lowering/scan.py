"""Cumulative operators along one dimension."""

from collections.abc import Callable

import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import fx

from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.reduction import widen
from dynamo_backends.xla.lowering.registry import lowers


def _prepared(ctx: Context, x: Array, dtype: torch.dtype | None) -> Array:
    return widen(x.astype(to_jax(dtype) if dtype is not None else ctx.out_dtype))


@lowers("cumsum.default")
def cumsum(ctx: Context, x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    x = _prepared(ctx, x, dtype)
    return jnp.cumsum(x, dim) if x.ndim else x


@lowers("cumprod.default")
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


@lowers("cummax.default")
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    return _running_extreme(x, dim, jnp.greater_equal)


@lowers("cummin.default")
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    return _running_extreme(x, dim, jnp.less_equal)


def _branch_is_open(node: fx.Node) -> str | None:
    if node.meta["val"].is_complex():
        return "the branch of a complex logarithm depends on the order of summation"
    return None


@lowers("logcumsumexp.default", when=_branch_is_open)
def logcumsumexp(x: Array, dim: int) -> Array:
    x = widen(x)
    return lax.associative_scan(jnp.logaddexp, x, axis=dim % x.ndim) if x.ndim else x
