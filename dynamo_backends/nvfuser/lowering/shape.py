"""Views and rearrangements: reshape, broadcast, permute, slice, concatenate, pad, copy."""

from collections.abc import Sequence
from typing import Any

import torch

from dynamo_backends.nvfuser.dtypes import NAMES
from dynamo_backends.nvfuser.lowering.registry import Call, Unsupported, register_lowering
from dynamo_backends.nvfuser.recorder import Number, Value


def _full(call: Call, number: Number) -> Value:
    return call.recorder.full(call.shape, number, call.dtype)


@register_lowering("full.default", context=True)
def full(call: Call, size: Sequence[int], fill_value: Number, **_: Any) -> Value:
    return _full(call, fill_value)


@register_lowering("scalar_tensor.default", context=True)
def scalar_tensor(call: Call, s: Number, **_: Any) -> Value:
    return _full(call, s)


@register_lowering("full_like.default", context=True)
def full_like(call: Call, x: Value, fill_value: Number, **_: Any) -> Value:
    return _full(call, fill_value)


@register_lowering("arange.start_step", context=True)
def arange(call: Call, start: Number, end: Number, step: Number = 1, **_: Any) -> Value:
    if not all(isinstance(x, int) for x in (start, end, step)):
        raise Unsupported("sequences of floating-point numbers are left to eager")
    return call.recorder.iota(call.shape[0], start, step)


def identity(x: Value, **_: Any) -> Value:
    return x


register_lowering("alias.default", "clone.default", "lift_fresh_copy.default")(identity)


@register_lowering("_to_copy.default", context=True)
def to_copy(call: Call, x: Value, *, dtype: torch.dtype | None = None, **_: Any) -> Value:
    if dtype is not None and dtype not in NAMES:
        raise Unsupported(f"nvFuser does not compute with {dtype}")
    return x


@register_lowering("view.default", "view_copy.default", context=True)
def view(call: Call, x: Value, size: Sequence[int]) -> Value:
    return x.reshape(call.shape)


@register_lowering("permute.default", "permute_copy.default")
def permute(x: Value, dims: Sequence[int]) -> Value:
    return x.permute([d % x.ndim for d in dims])


@register_lowering("unsqueeze.default")
def unsqueeze(x: Value, dim: int) -> Value:
    return x.unsqueeze([dim % (x.ndim + 1)])


@register_lowering("squeeze.dims")
def squeeze(x: Value, dim: Sequence[int]) -> Value:
    return x.squeeze([d for d in x.dims(dim) if x.shape[d] == 1] if dim else [])


@register_lowering("expand.default", context=True)
def expand(call: Call, x: Value, size: Sequence[int], *, implicit: bool = False) -> Value:
    return x.expand(call.shape)


@register_lowering("copy.default", context=True)
def copy(call: Call, x: Value, source: Value, non_blocking: bool = False) -> Value:
    return source.cast(x.dtype).expand(call.shape)


@register_lowering("repeat.default", context=True)
def repeat(call: Call, x: Value, repeats: Sequence[int]) -> Value:
    """Repeats along dimensions: each becomes one of repetitions and one of elements first."""
    x = x.leading(len(repeats))
    if all(n == 1 for n in repeats):
        return x
    apart = x.unsqueeze(range(0, 2 * x.ndim, 2))
    sizes = [s for pair in zip(repeats, x.shape, strict=True) for s in pair]
    if apart.ndim > 8:
        raise Unsupported("nvFuser has tensors of at most 8 dimensions")
    return apart.expand(sizes).reshape(call.shape)


@register_lowering("slice.Tensor")
def slice_(
    x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    dim %= x.ndim
    first, last, _ = slice(start, end).indices(x.shape[dim])
    if step != 1 and last - first > 1:
        raise Unsupported("nvFuser slices with steps of 1 only")
    return x.slice(dim, first, last)


@register_lowering("select.int")
def select(x: Value, dim: int, index: int) -> Value:
    dim, index = dim % x.ndim, index % x.shape[dim]
    return x.slice(dim, index, index + 1).squeeze([dim])


@register_lowering("split_with_sizes.default", context=True)
def split_with_sizes(
    call: Call, x: Value, split_sizes: Sequence[int], dim: int = 0
) -> tuple[Value, ...]:
    dim %= x.ndim
    ends = [sum(split_sizes[: i + 1]) for i in range(len(split_sizes))]
    if any(size == 0 for size in split_sizes):
        raise Unsupported("a result has no elements")
    return tuple(x.slice(dim, e - n, e) for e, n in zip(ends, split_sizes, strict=True))


@register_lowering("cat.default", context=True)
def cat(call: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(call.shape)
    if any(x.ndim != len(call.shape) for x in tensors):
        raise Unsupported("a part has no elements")
    return call.recorder.concatenate([x.cast(call.dtype) for x in tensors], dim)


@register_lowering("constant_pad_nd.default")
def constant_pad(x: Value, pad: Sequence[int], value: Number = 0) -> Value:
    if any(width < 0 for width in pad):
        raise Unsupported("nvFuser does not pad by negative widths")
    if not any(pad):
        return x
    return x.recorder.pad(x, pad, value)
