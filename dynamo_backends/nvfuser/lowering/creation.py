"""Tensors made of numbers. Only what a block with other inputs computes with is worth a fusion."""

from collections.abc import Sequence
from typing import Any

from dynamo_backends.nvfuser.lowering.registry import Call, Unsupported, lowers
from dynamo_backends.nvfuser.values import Number, Value


def _full(call: Call, number: Number) -> Value:
    return call.recorder.full(call.shape, number, call.dtype)


@lowers("full.default", context=True)
def full(call: Call, size: Sequence[int], fill_value: Number, **_: Any) -> Value:
    return _full(call, fill_value)


@lowers("scalar_tensor.default", context=True)
def scalar_tensor(call: Call, s: Number, **_: Any) -> Value:
    return _full(call, s)


@lowers("full_like.default", context=True)
def full_like(call: Call, x: Value, fill_value: Number, **_: Any) -> Value:
    return _full(call, fill_value)


@lowers("arange.start_step", context=True)
def arange(call: Call, start: Number, end: Number, step: Number = 1, **_: Any) -> Value:
    if not all(isinstance(x, int) for x in (start, end, step)):
        raise Unsupported("sequences of floating-point numbers are left to eager")
    return call.recorder.iota(call.shape[0], start, step)
