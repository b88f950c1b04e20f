"""Reading at indices; what indices in the padding read is garbage, and stays in the padding."""

from typing import Any

import jax.numpy as jnp
from torch import fx

from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.extents import Extents, bound_of
from dynamo_backends.xla.lowering.padded.registry import register_padding_rule


@register_padding_rule("embedding.default")
def embedding(call: PaddedCall) -> Placed:
    call.need_whole("weight")
    return call.run(), (*call["indices"].extents, *call["weight"].extents[1:])


@register_padding_rule("index.Tensor", "_unsafe_index.Tensor")
def index(call: PaddedCall) -> Placed:
    """Negative indices count from the real end."""
    x = call["self"]
    given: list[Any] = list(call.value("indices"))
    axes = [d for d, i in enumerate(given) if i is not None]
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise call.refuse("its indices are not in adjacent dimensions")
    read: list[Any] = [None] * len(given)
    placed: list[Extents] = []
    for d in axes:
        node: fx.Node = given[d]
        indices = call.operand(node)
        read[d] = indices.array
        if x.is_padded([d]):
            if len(x.extents[d]) > 1:
                raise call.refuse("it indexes several merged dimensions")
            end = jnp.asarray(call.validity.count(x.extents[d]), read[d].dtype)
            read[d] = jnp.where(read[d] < 0, read[d] + end, read[d])
        placed.append(indices.extents)
    between = call.need_agreeing(*placed)
    result = (*x.extents[: axes[0]], *between, *x.extents[axes[-1] + 1 :])
    return call.run(indices=read), result


@register_padding_rule("index_put.default", "_unsafe_index_put.default")
def index_put(call: PaddedCall) -> Placed:
    """Indices in the padding are beyond the end, where nothing is written."""
    x, given = call["self"], list(call.value("indices"))
    axes = [d for d, i in enumerate(given) if i is not None]
    rows = call.operand(given[axes[0]])
    if len(axes) > 1 or rows.ndim != 1 or rows.array.dtype in (jnp.bool_, jnp.uint8):
        raise call.refuse("it does not write whole rows")
    (d,) = axes
    if len(x.extents[d]) > 1:
        raise call.refuse("it writes along several merged dimensions")
    wanted = (*x.extents[:d], rows.extents[0], *x.extents[d + 1 :])
    call.need_agreeing(wanted, call["values"].extents)
    read = rows.array.astype(jnp.int64)
    if x.is_padded([d]):
        read = jnp.where(read < 0, read + call.validity.count(x.extents[d]), read)
    valid = call.validity.of(rows.extents, [0])
    if valid is not None:
        read = jnp.where(valid, read, bound_of(x.extents[d]))
    given[d] = read
    return call.run(indices=given), x.extents


@register_padding_rule("index_select.default")
def index_select(call: PaddedCall) -> Placed:
    x, d = call["self"], call.dim("self")
    if x.ndim == 0 or len(x.extents[d]) > 1:
        raise call.refuse("it indexes several merged dimensions")
    read = call["index"].extents
    return call.run(), (*x.extents[:d], read[0] if read else (), *x.extents[d + 1 :])


@register_padding_rule("gather.default")
def gather(call: PaddedCall) -> Placed:
    x, indices, d = call["self"], call["index"], call.dim("self")
    _need_same_rows(call, "index", d)
    if x.ndim and len(x.extents[d]) > 1:
        raise call.refuse("it indexes several merged dimensions")
    return call.run(), indices.extents


@register_padding_rule("scatter.value", "scatter.src", "scatter_add.default")
def scatter(call: PaddedCall) -> Placed:
    """Scatters each row's own values; what is written in the padding stays there."""
    x, d = call["self"], call.dim("self")
    if x.ndim == 0 or len(x.extents[d]) > 1:
        raise call.refuse("it writes along several merged dimensions")
    call.need_whole("index", [d])
    for name in ("index", "src"):
        if call.get(name) is not None:
            _need_same_rows(call, name, d)
    return call.run(), x.extents


def _need_same_rows(call: PaddedCall, name: str, dim: int) -> None:
    own, other = call["self"].extents, call[name].extents
    if any(a != b for d, (a, b) in enumerate(zip(own, other, strict=True)) if d != dim):
        raise call.refuse(f"{name} is padded differently from the tensor that it belongs to")
