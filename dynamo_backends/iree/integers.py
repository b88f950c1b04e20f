"""Calls on integers in the words that IREE's compiler understands.

With IREE 3.13 it breaks down at products of bytes with -1, has no constants of unsigned bytes and
no division of bytes that rounds down, and takes unsigned bytes for signed ones where it divides or
sorts them. Remainders of bytes are wrong even where they are computed in 32 bits; in float32 they
are exact.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    """Bytes as 32-bit numbers; others as they are."""
    return x.to(torch.int32) if x.dtype.itemsize == 1 else x


def in_dtype(number: int, dtype: torch.dtype) -> int:
    """Returns a number as eager casts it to a dtype of integers."""
    info = torch.iinfo(dtype)
    return (number - info.min) % (1 << info.bits) + info.min


def _negative(x: Tensor) -> Tensor:
    return (_wide(x) * -1).to(x.dtype)


def _magnitude(x: Tensor) -> Tensor:
    if not x.dtype.is_signed:
        return x.clone()
    wide = _wide(x)
    return torch.where(wide < 0, wide * -1, wide).to(x.dtype)


def _quotient(x: Tensor, y: int, *, rounding_mode: str | None) -> Tensor:
    y = in_dtype(y, x.dtype)
    if x.dtype.itemsize == 1:
        quotient = x.float() / y
        return (quotient.floor() if rounding_mode == "floor" else _toward_0(quotient)).to(x.dtype)
    quotient = torch.div(x, y, rounding_mode="trunc")
    if rounding_mode == "floor":
        rest = x - quotient * y
        quotient = torch.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)
    return quotient


def _toward_0(x: Tensor) -> Tensor:
    return torch.where(x < 0, x.ceil(), x.floor())


def _remainder(x: Tensor, y: int) -> Tensor:
    if x.dtype.itemsize > 1:
        return torch.remainder(x, y)
    wide, y = x.float(), in_dtype(y, x.dtype)
    return (wide - (wide / y).floor() * y).to(x.dtype)


def _fmod(x: Tensor, y: int) -> Tensor:
    y = in_dtype(y, x.dtype)
    if x.dtype.itemsize == 1:
        wide = x.float()
        return (wide - _toward_0(wide / y) * y).to(x.dtype)
    rest = torch.remainder(x, y)
    return torch.where((rest != 0) & ((x < 0) != (y < 0)), rest - y, rest)


def _sort(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    values, places = aten.sort.default(_wide(x), *args)
    return values.to(x.dtype), places


def _topk(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    values, places = aten.topk.default(_wide(x), *args)
    return values.to(x.dtype), places


def _full_of_bytes(size: Any, value: Any, **_: Any) -> Tensor:
    number = float(in_dtype(int(value), torch.uint8))
    if size:
        return torch.full(size, number).to(torch.uint8)
    # A cast of a constant of one element would be folded, to one of signed bytes.
    return (torch.arange(1, dtype=torch.float32) + number).to(torch.uint8).reshape([])


OF_INTEGERS: Mapping[Any, Callable[..., Any]] = {
    aten.abs.default: _magnitude,
    aten.div.Tensor_mode: _quotient,
    aten.fmod.Scalar: _fmod,
    aten.fmod.Tensor: _fmod,
    aten.neg.default: _negative,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Tensor: _remainder,
    aten.sort.default: _sort,
    aten.topk.default: _topk,
}
"""Of integers alone, by the operator."""

DIVISIONS = (
    aten.div.Tensor_mode, aten.fmod.Scalar, aten.fmod.Tensor, aten.remainder.Scalar,
    aten.remainder.Tensor,
)  # fmt: skip
"""Those whose divisor is to be a number."""

OF_BYTES: Mapping[Any, Callable[..., Tensor]] = {
    aten.full.default: _full_of_bytes,
    aten.full_like.default: lambda x, value, **_: _full_of_bytes(x.shape, value),
    aten.scalar_tensor.default: lambda value, **_: _full_of_bytes([], value),
}
"""Constants of unsigned bytes."""
