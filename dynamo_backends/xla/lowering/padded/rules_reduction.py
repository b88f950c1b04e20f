"""Reductions: the neutral element where nothing counts, and the real number of elements."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.padded.call import Neutral, PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.registry import register_padding_rule
from dynamo_backends.xla.lowering.reduction import widen


def lowest(dtype: Any) -> Any:
    """Returns the least value of a dtype, the neutral element of a maximum."""
    if dtype == jnp.bool_:
        return False
    return -math.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """Returns the largest value of a dtype, the neutral element of a minimum."""
    if dtype == jnp.bool_:
        return True
    return math.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


_NEUTRAL: dict[str, Neutral] = {
    "sum.default": 0,
    "sum.dim_IntList": 0,
    "prod.default": 1,
    "prod.dim_int": 1,
    "amax.default": lowest,
    "amin.default": highest,
    "max.default": lowest,
    "min.default": highest,
    "any.default": 0,
    "any.dim": 0,
    "any.dims": 0,
    "all.default": 1,
    "all.dim": 1,
    "all.dims": 1,
}


def _name(call: PaddedCall) -> str:
    return str(call.node.target).removeprefix("aten.")


@register_padding_rule(*_NEUTRAL)
def reduce(call: PaddedCall) -> Placed:
    x = call["self"]
    over = call.axes("self", "dim")
    if _name(call) in ("any.dims", "all.dims") and call.value("dim") == []:
        over = ()
    masked = x.masked(over, _NEUTRAL[_name(call)])
    return call.run(self=masked), x.without(over, bool(call.value("keepdim")))


@register_padding_rule("logsumexp.default")
def logsumexp(call: PaddedCall) -> Placed:
    """Reduces integers as floating-point numbers, since no integer is low enough."""
    x, over = call["self"], call.axes("self", "dim")
    if not jnp.issubdtype(x.array.dtype, jnp.inexact):
        x = x.astype(to_jax(call.node.meta["val"].dtype))
    return call.run(self=x.masked(over, lowest)), x.without(over, bool(call.value("keepdim")))


@register_padding_rule("mean.default", "mean.dim")
def mean(call: PaddedCall) -> Placed:
    x = call["self"]
    over = call.axes("self", "dim")
    keepdim = bool(call.value("keepdim"))
    placed = x.without(over, keepdim)
    masked = x.masked(over)
    if masked is None:
        return call.run(), placed
    dtype = call.value("dtype")
    values = widen(masked if dtype is None or dtype.itemsize < 4 else masked.astype(to_jax(dtype)))
    total = jnp.sum(values, over, keepdims=keepdim)
    return total / _count(call, over).astype(total.dtype), placed


@register_padding_rule(
    "var.correction", "std.correction", "var_mean.correction", "std_mean.correction"
)
def variance(call: PaddedCall) -> Placed:
    x = call["self"]
    over, keepdim = call.axes("self", "dim"), bool(call.value("keepdim"))
    placed = x.without(over, keepdim)
    name = _name(call).partition(".")[0]
    with_mean = name.endswith("_mean")
    valid = call.validity.of(x.extents, over)
    if valid is None:
        return call.run(), (placed, placed) if with_mean else placed
    values = widen(x.whole(over))
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise call.refuse("variance of complex numbers is not supported")
    count = _count(call, over).astype(values.dtype)
    mean = jnp.sum(values, over, keepdims=True) / count
    centred = jnp.where(valid, values - mean, 0)
    correction = call.value("correction")
    free = jnp.maximum(count - (1 if correction is None else correction), 0)
    spread = jnp.sum(centred * centred, over, keepdims=keepdim) / free
    result = jnp.sqrt(spread) if name.startswith("std") else spread
    if not with_mean:
        return result, placed
    return (result, mean if keepdim else jnp.squeeze(mean, over)), (placed, placed)


def _count(call: PaddedCall, over: Sequence[int]) -> jax.Array:
    """Returns how many elements are reduced."""
    extents = call["self"].extents
    return jnp.asarray(math.prod(call.validity.count(extents[d]) for d in over))


@register_padding_rule("argmax.default", "argmin.default", "max.dim", "min.dim")
def place_of_extreme(call: PaddedCall) -> Placed:
    """Handles padding for argmax, argmin, max.dim and min.dim."""
    x, name = call["self"], _name(call)
    if call.value("dim") is None:
        call.need_whole("self")
    over = call.axes("self", "dim")
    if any(len(x.extents[d]) > 1 for d in over):
        raise call.refuse("it returns indices along merged dimensions")
    placed = x.without(over, bool(call.value("keepdim")))
    result = call.run(self=x.masked(over, lowest if "max" in name else highest))
    return result, placed if name.startswith("arg") else (placed, placed)


@register_padding_rule("cumsum.default", "cumprod.default", "logcumsumexp.default")
def cumulative(call: PaddedCall) -> Placed:
    neutral: Neutral = {"cumsum": 0, "cumprod": 1}.get(_name(call).partition(".")[0], lowest)
    x = call["self"]
    return call.run(self=x.masked([call.dim("self")], neutral)), x.extents


@register_padding_rule("cummax.default", "cummin.default")
def running_extreme(call: PaddedCall) -> Placed:
    x, d = call["self"], call.dim("self")
    if x.ndim and len(x.extents[d]) > 1:
        raise call.refuse("it returns indices along merged dimensions")
    return call.run(), (x.extents, x.extents)


@register_padding_rule("linalg_vector_norm.default")
def vector_norm(call: PaddedCall) -> Placed:
    """Zeros add nothing to a norm whose order is positive."""
    x, over = call["self"], call.axes("self", "dim")
    order = call.value("ord")
    if x.is_padded(over) and order < 0:
        raise call.refuse("it searches for the smallest element")
    return call.run(self=x.masked(over)), x.without(over, bool(call.value("keepdim")))
