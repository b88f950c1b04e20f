"""Sorting: padding comes after everything else.

It gets the key that comes last, and equal keys stay in their order, in which padding is behind.
"""

import math
from typing import Any

import jax.numpy as jnp

from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.registry import register_padding_rule
from dynamo_backends.xla.lowering.padded.rules_reduction import highest, lowest


def last_sort_key(dtype: Any) -> Any:
    """Returns the value that sorts last in ascending order: NaN, or the largest integer."""
    return math.nan if jnp.issubdtype(dtype, jnp.floating) else highest(dtype)


@register_padding_rule(
    "sort.default",
    "sort.stable",
    "argsort.default",
    "argsort.stable",
    "msort.default",
    "topk.default",
)
def sort(call: PaddedCall) -> Placed:
    x, d = call["self"], call.dim("self")
    if x.ndim and len(x.extents[d]) > 1:
        raise call.refuse("it returns indices along merged dimensions")
    falls = call.value("largest" if "topk" in str(call.node.target) else "descending")
    result = call.run(self=x.masked([d] if x.ndim else [], lowest if falls else last_sort_key))
    placed = x.extents
    if "topk" in str(call.node.target) and x.ndim:
        placed = (*placed[:d], call.fresh(0)[d], *placed[d + 1 :])
    return result, (placed, placed) if isinstance(result, tuple) else placed
