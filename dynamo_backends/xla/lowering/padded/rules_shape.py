"""Views: dimensions that are carried over, merged, split, permuted, spread or cut."""

import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.extents import (
    Extent,
    Extents,
    bound_of,
    extents_of,
    merged,
    reshaped,
    size_from_extent,
)
from dynamo_backends.xla.lowering.padded.registry import register_padding_rule


@register_padding_rule(
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "view_copy.default",
    "_reshape_copy.default",
    "unsqueeze.default",
    "unsqueeze_copy.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "flatten.using_ints",
    shapes=("size", "shape"),
)
def reshape(call: PaddedCall) -> Placed:
    x, sizes = call["self"], call.sizes()
    placed = reshaped(x.extents, sizes)
    if placed is not None:
        return call.run(), placed
    # One of the two may not know that it was merged of what the other has.
    placed = extents_of(sizes)
    merged_as = reshaped(placed, [size_from_extent(e) for e in x.extents])
    if merged_as is None:
        raise call.refuse("it is not a view that merges or splits whole dimensions")
    return call.run(self=x.aligned(merged_as).array), placed


@register_padding_rule("permute.default", "permute_copy.default")
def permute(call: PaddedCall) -> Placed:
    x = call["self"]
    return call.run(), tuple(x.extents[d] for d in call.value("dims"))


@register_padding_rule("transpose.int", "transpose_copy.int")
def transpose(call: PaddedCall) -> Placed:
    extents = list(call["self"].extents)
    a, b = call.dim("self", "dim0"), call.dim("self", "dim1")
    if extents:
        extents[a], extents[b] = extents[b], extents[a]
    return call.run(), tuple(extents)


@register_padding_rule("t.default", "t_copy.default")
def t(call: PaddedCall) -> Placed:
    return call.run(), call["self"].extents[::-1]


@register_padding_rule("expand.default", "expand_copy.default", shapes=("size",))
def expand(call: PaddedCall) -> Placed:
    fresh = call.fresh()
    own = call["self"].extents
    own = ((),) * (len(fresh) - len(own)) + own
    return call.run(), tuple(e or f for e, f in zip(own, fresh, strict=True))


@register_padding_rule("slice.Tensor", "slice_copy.Tensor", shapes=("end",))
def slice_(call: PaddedCall) -> Placed:
    """Slices; what is left beyond the real end, from which negative numbers count, is padding."""
    x, d = call["self"], call.dim("self")
    start = call.value("start") or 0
    placed = _with(x.extents, d, call.fresh()[d])
    if not x.is_padded([d]):
        return call.run(), placed
    if len(x.extents[d]) > 1 or (start < 0 and call.value("step") not in (None, 1)):
        raise call.refuse("its start index depends on a dynamic size")
    if start >= 0:
        return call.run(), placed
    begin = jnp.maximum(call.validity.count(x.extents[d]) + start, 0)
    size = call.node.meta["val"].shape[d]
    return lax.dynamic_slice_in_dim(x.array, begin, size, d), placed


@register_padding_rule("select.int", "select_copy.int")
def select(call: PaddedCall) -> Placed:
    """Negative indices count from the real end."""
    x, d = call["self"], call.dim("self")
    index = call.value("index")
    placed = x.without([d])
    if not x.is_padded([d]):
        return call.run(), placed
    if len(x.extents[d]) > 1:
        raise call.refuse("it selects along several merged dimensions")
    if index >= 0:
        return call.run(), placed
    place = call.validity.count(x.extents[d]) + index
    return lax.dynamic_index_in_dim(x.array, place, d, keepdims=False), placed


@register_padding_rule("cat.default")
def cat(call: PaddedCall) -> Placed:
    """Along a dimension that varies each part begins at the real end of the one before it."""
    parts = [call.operand(n) for n in call.value("tensors")]
    parts = [x for x in parts if not (x.ndim == 1 and bound_of(x.extents[0]) == 0)]
    d = (call.value("dim") or 0) % parts[0].ndim
    others = call.need_agreeing(*(_with(x.extents, d, ()) for x in parts))
    placed = _with(others, d, call.fresh()[d])
    if not any(x.is_padded([d]) for x in parts):
        return call.run(), placed
    if any(len(x.extents[d]) > 1 for x in parts):
        raise call.refuse("it concatenates along merged dimensions")
    value = call.node.meta["val"]
    joined, begin = jnp.zeros(value.shape, to_jax(value.dtype)), jnp.asarray(0, jnp.int64)
    for x in parts:
        joined = lax.dynamic_update_slice_in_dim(joined, x.array.astype(joined.dtype), begin, d)
        begin = begin + call.validity.count(x.extents[d])
    return joined, placed


@register_padding_rule("stack.default")
def stack(call: PaddedCall) -> Placed:
    parts = [call.operand(n) for n in call.value("tensors")]
    d = (call.value("dim") or 0) % (parts[0].ndim + 1)
    placed = list(call.need_agreeing(*(x.extents for x in parts)))
    placed.insert(d, call.fresh()[d])
    return call.run(), tuple(placed)


@register_padding_rule(
    "split.Tensor",
    "split_copy.Tensor",
    "unsafe_split.Tensor",
    "split_with_sizes.default",
    "split_with_sizes_copy.default",
    "unsafe_split_with_sizes.default",
)
def split(call: PaddedCall) -> Placed:
    x, d = call["self"], call.dim("self")
    call.need_whole("self", [d])
    count = len(call.node.meta["val"])
    return call.run(), tuple(_with(x.extents, d, call.fresh(i)[d]) for i in range(count))


@register_padding_rule("unbind.int", "unbind_copy.int")
def unbind(call: PaddedCall) -> Placed:
    x, d = call["self"], call.dim("self")
    call.need_whole("self", [d])
    return call.run(), (x.without([d]),) * len(call.node.meta["val"])


@register_padding_rule("tril.default", "triu.default")
def triangle(call: PaddedCall) -> Placed:
    x = call["self"]
    if any(len(e) > 1 for e in x.extents[-2:]):
        raise call.refuse("it depends on positions in merged dimensions")
    return call.run(), x.extents


@register_padding_rule("flip.default")
def flip(call: PaddedCall) -> Placed:
    """From the real end to the start."""
    x = call["self"]
    dims = [d % max(x.ndim, 1) for d in call.value("dims")]
    array = x.array
    for d in dims:
        if len(x.extents[d]) > 1:
            raise call.refuse("it flips merged dimensions")
        places = call.validity.count(x.extents[d]) - 1 - jnp.arange(bound_of(x.extents[d]))
        array = jnp.take(array, places, axis=d, mode="clip")
    return (array if any(map(x.is_padded, ([d] for d in dims))) else call.run()), x.extents


@register_padding_rule("roll.default", shapes=("shifts",))
def roll(call: PaddedCall) -> Placed:
    """Returns what leaves at the real end comes in at the start."""
    x = call["self"]
    dims = [d % max(x.ndim, 1) for d in call.value("dims") or ()]
    if not x.is_padded(dims or range(x.ndim)):
        return call.run(), x.extents
    if not dims or any(len(x.extents[d]) > 1 for d in dims):
        raise call.refuse("it rolls merged dimensions")
    array = x.array
    for shift, d in zip(call.value("shifts"), dims, strict=True):
        size = jnp.maximum(call.validity.count(x.extents[d]), 1)
        places = (jnp.arange(bound_of(x.extents[d])) - call.number(shift)) % size
        array = jnp.take(array, places, axis=d, mode="clip")
    return array, x.extents


@register_padding_rule("repeat.default", shapes=("repeats",))
def repeat(call: PaddedCall) -> Placed:
    """Repeats: each dimension becomes a grid of its repetitions and itself."""
    own, times = call["self"].extents, extents_of(call.value("repeats"))
    own = ((),) * (len(times) - len(own)) + own
    return call.run(), tuple(merged((*n, *e)) for n, e in zip(times, own, strict=True))


@register_padding_rule("constant_pad_nd.default")
def constant_pad(call: PaddedCall) -> Placed:
    x, fresh = call["self"], call.fresh()
    pad = call.value("pad")
    given = [x.ndim - 1 - i // 2 for i, n in enumerate(pad) if n]
    call.need_whole("self", given)
    return call.run(), tuple(f if d in given else x.extents[d] for d, f in enumerate(fresh))


def _with(extents: Extents, dim: int, extent: Extent) -> Extents:
    return (*extents[:dim], extent, *extents[dim + 1 :])
