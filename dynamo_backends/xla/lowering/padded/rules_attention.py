"""Fused attention: keys that are padding are not seen."""

import math

import jax
import jax.numpy as jnp

from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.registry import pads


def _mask(call: PaddedCall, name: str) -> jax.Array | None:
    """Returns the mask of a call, with what hides padded keys; None: it stays as it is."""
    key = call["key"]
    seen = call.validity.of(key.extents[2:3], [0])
    mask = call.get(name)
    if mask is None:
        return seen
    query = call["query"]
    scores = (query.extents[0], query.extents[1], query.extents[2], key.extents[2])
    call.need_agreeing(scores, mask.extents)
    if seen is None:
        return mask.masked()
    array = mask.masked()
    array = mask.array if array is None else array
    return array & seen if array.dtype == jnp.bool_ else jnp.where(seen, array, -math.inf)


def _whole_features(call: PaddedCall) -> None:
    for name in ("query", "key", "value"):
        call.need_whole(name, [1, 3])
    q, k, v = (call[n].extents for n in ("query", "key", "value"))
    if q[0] != k[0] or k[:1] != v[:1] or k[2] != v[2]:
        raise call.refuse("queries, keys and values are padded differently")


@pads("_scaled_dot_product_flash_attention_for_cpu.default")
def flash_attention_for_cpu(call: PaddedCall) -> Placed:
    _whole_features(call)
    q, k, v = call["query"], call["key"], call["value"]
    result = call.run(key=k.masked([2]), value=v.masked([2]), attn_mask=_mask(call, "attn_mask"))
    return result, ((*q.extents[:3], v.extents[3]), q.extents[:3])


@pads("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def flash_attention_for_cpu_backward(call: PaddedCall) -> Placed:
    """Queries that are padding give gradients of 0 to keys and values."""
    _whole_features(call)
    q = call["query"]
    for name in ("grad_out", "out", "logsumexp"):
        if call[name].extents[2] != q.extents[2]:
            raise call.refuse(f"{name} is padded otherwise than the queries")
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    masked = {name: call[name].masked([2]) for name in names}
    result = call.run(**masked, attn_mask=_mask(call, "attn_mask"))
    return result, tuple(call[n].extents for n in ("query", "key", "value"))
