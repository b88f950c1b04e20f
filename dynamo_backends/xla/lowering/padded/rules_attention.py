"""Fused attention: keys that are padding are not seen."""

import math

import jax
import jax.numpy as jnp

from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.registry import register_padding_rule


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


@register_padding_rule("_scaled_dot_product_flash_attention_for_cpu.default")
def flash_attention_for_cpu(call: PaddedCall) -> Placed:
    _whole_features(call)
    q, k, v = call["query"], call["key"], call["value"]
    result = call.run(key=k.masked([2]), value=v.masked([2]), attn_mask=_mask(call, "attn_mask"))
    return result, ((*q.extents[:3], v.extents[3]), q.extents[:3])
