"""Convolutions, pooling and batch norm of any number of images, most of any size."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynamo_backends.xla.lowering.batch_norm import ValidElements
from dynamo_backends.xla.lowering.padded.call import Operand, PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.extents import Extents, bound_of
from dynamo_backends.xla.lowering.padded.registry import register_padding_rule
from dynamo_backends.xla.lowering.padded.rules_reduction import lowest
from dynamo_backends.xla.lowering.values import to_logical_array


def _spatial(call: PaddedCall, name: str, rank: int) -> list[int]:
    """The dimensions of images; the channels have to be whole, and no two dimensions merged."""
    x = call[name]
    dims = list(range(x.ndim - rank, x.ndim))
    call.need_whole(name, [x.ndim - rank - 1])
    if any(len(x.extents[d]) > 1 for d in dims):
        raise call.refuse("its windows slide over merged dimensions")
    return dims


def _rest(call: PaddedCall, leading: Extents, index: int | None = None) -> Extents:
    return (*leading, *call.fresh(index)[len(leading) :])


@register_padding_rule("convolution.default", "_convolution.default")
def convolution(call: PaddedCall) -> Placed:
    """Returns what is beyond the real ends of an image is zero, as a convolution's own padding."""
    call.need_whole("weight")
    x, rank = call["input"], call["weight"].ndim - 2
    dims = _spatial(call, "input", rank)
    return call.run(input=x.masked(dims)), _rest(call, x.extents[: x.ndim - rank - 1])


def _rank(call: PaddedCall) -> int:
    return 2 if "pool2d" in str(call.node.target) else 3


@register_padding_rule("avg_pool2d.default", "avg_pool3d.default")
def average_pool(call: PaddedCall) -> Placed:
    x, dims = call["self"], _spatial(call, "self", _rank(call))
    if x.is_padded(dims):
        _need_equal_divisors(call)
    return call.run(self=x.masked(dims)), _rest(call, x.extents[: dims[0]])


def _need_equal_divisors(call: PaddedCall) -> None:
    """Refuses windows of which some average fewer elements: which ones follows from the size."""
    padding = call.value("padding")
    included = call.value("count_include_pad") or not any(
        padding if isinstance(padding, list | tuple) else (padding,)
    )
    if call.value("divisor_override") is None and (call.value("ceil_mode") or not included):
        raise call.refuse("windows at the border average fewer elements")


@register_padding_rule("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default")
def adaptive_pool(call: PaddedCall) -> Placed:
    x, rank = call["self"], _rank(call)
    call.need_whole("self", range(x.ndim - rank, x.ndim))
    return call.run(), _rest(call, x.extents[: x.ndim - rank])


@register_padding_rule("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def max_pool(call: PaddedCall) -> Placed:
    x, dims = call["self"], _spatial(call, "self", _rank(call))
    values, places = call.run(self=x.masked(dims, lowest))
    if x.is_padded(dims):
        bounds = [bound_of(x.extents[d]) for d in dims]
        real = [call.validity.count(x.extents[d]) for d in dims]
        places = _counted_by(to_logical_array(places), bounds, real)
    leading = x.extents[: dims[0]]
    return (values, places), (_rest(call, leading, 0), _rest(call, leading, 1))


def _counted_by(places: jax.Array, sizes: Sequence[Any], wanted: Sequence[Any]) -> jax.Array:
    """Places in a flattened image of some sizes as those in one of others."""
    left, result, stride = places, jnp.zeros_like(places), jnp.asarray(1, places.dtype)
    for size, other in zip(reversed(sizes), reversed(wanted), strict=True):
        size = jnp.maximum(jnp.asarray(size, places.dtype), 1)
        result = result + left % size * stride
        left, stride = left // size, stride * jnp.asarray(other, places.dtype)
    return result


@register_padding_rule("_native_batch_norm_legit_no_training.default")
def batch_norm(call: PaddedCall) -> Placed:
    """With running statistics: elementwise."""
    x = call["input"]
    call.need_whole("input", [1])
    return call.run(), (x.extents, call.fresh(1), call.fresh(2))


def _training_batch_norm(call: PaddedCall, x: Operand) -> Any:
    """Statistics are of the elements that there are."""
    call.need_whole("input", [1])
    over = [d for d in range(x.ndim) if d != 1]
    valid = call.validity.of(x.extents, over)
    if valid is None:
        return call.run()
    count = jnp.asarray(math.prod(call.validity.count(x.extents[d]) for d in over))
    return call.run(real=ValidElements(valid, count))


@register_padding_rule(
    "_native_batch_norm_legit_functional.default",
    "_native_batch_norm_legit.no_stats",
    "_batch_norm_with_update_functional.default",
    "native_batch_norm.default",
)
def batch_norm_in_training(call: PaddedCall) -> Placed:
    x = call["input"]
    if call.value("training") is False:
        call.need_whole("input", [1])
        result = call.run()
    else:
        result = _training_batch_norm(call, x)
    return result, (x.extents, *(call.fresh(i) for i in range(1, len(result))))


@register_padding_rule("native_group_norm.default", shapes=("N",))
def group_norm(call: PaddedCall) -> Placed:
    x = call["input"]
    call.need_whole("input", range(1, x.ndim))
    statistics = (x.extents[0], *call.fresh(1)[1:])
    return call.run(), (x.extents, statistics, statistics)
