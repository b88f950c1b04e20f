"""Sums, means and maxima over bags of embedding vectors."""

from typing import Any

import jax
import jax.numpy as jnp

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import by_name, lowers

_SUM, _MEAN, _MAX = 0, 1, 2


@lowers("_embedding_bag_forward_only.default")
@by_name
def embedding_bag(
    ctx: Context,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    mode: int = 0,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, ...]:
    """Bags of the flat `indices`, each from its offset to the next; empty bags give zeros.

    Only the first result is defined: the others serve a backward pass that does not exist here.
    """
    bags = ctx.out[0].shape[0]
    wide = accumulation_dtype(weight.dtype)
    starts = offsets[:bags]
    places = jnp.arange(indices.shape[0])
    # Repeated offsets make empty bags: an element belongs to the last bag that starts before it.
    bag = jnp.searchsorted(starts, places, side="right", method="compare_all") - 1
    counted = bag >= 0
    if include_last_offset:
        counted &= places < offsets[-1]
    if padding_idx >= 0:
        counted &= indices != padding_idx
    bag = jnp.where(counted, bag, bags)
    rows = jnp.take(weight, indices, axis=0, mode="clip").astype(wide)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None].astype(wide)
    counts = jnp.zeros((bags, 1), jnp.int32).at[bag].add(1, mode="drop")
    if mode == _MAX:
        total = jnp.full((bags, weight.shape[1]), -jnp.inf, wide).at[bag].max(rows, mode="drop")
        total = jnp.where(counts == 0, 0, total)
    else:
        total = jnp.zeros((bags, weight.shape[1]), wide).at[bag].add(rows, mode="drop")
        if mode == _MEAN:
            total = total / jnp.maximum(counts, 1).astype(wide)
    return total, *(jnp.zeros(x.shape, jnp.int64) for x in ctx.out[1:])
