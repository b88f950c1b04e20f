"""Reductions: the neutral element where nothing counts, and the real number of elements."""

import math
from typing import Any

import jax.numpy as jnp

from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.padded.call import Neutral, PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.registry import pads
from dynamo_backends.xla.lowering.reduction import widen


def lowest(dtype: Any) -> Any:
    """What no maximum is below."""
    if dtype == jnp.bool_:
        return False
    return -math.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """What no minimum is above."""
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


@pads(*_NEUTRAL)
def reduce(call: PaddedCall) -> Placed:
    x = call["self"]
    over = call.axes("self", "dim")
    if _name(call) in ("any.dims", "all.dims") and call.value("dim") == []:
        over = ()
    masked = x.masked(over, _NEUTRAL[_name(call)])
    return call.run(self=masked), x.without(over, bool(call.value("keepdim")))


@pads("mean.default", "mean.dim")
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
    count = math.prod(call.validity.count(x.extents[d]) for d in over)
    total = jnp.sum(values, over, keepdims=keepdim)
    return total / jnp.asarray(count, total.dtype), placed
