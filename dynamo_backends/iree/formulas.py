"""Functions and integer operations that IREE lacks, or computes less precisely than eager."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def signbit(x: Tensor) -> Tensor:
    """Computes `torch.signbit`."""
    return x.view(_BITS[x.dtype.itemsize]) < 0


def copysign(x: Tensor, y: Tensor) -> Tensor:
    """Computes `torch.copysign`."""
    return torch.where(signbit(y), -x.abs(), x.abs())


def to_copy(x: Tensor, *, dtype: torch.dtype, **_: Any) -> Tensor:
    """Returns a cast to bfloat16 whose rounding stays where another cast follows.

    IREE computes with bfloat16 in float32, and leaves out what casts it back and forth.
    """
    wide = x.to(torch.float32)
    bits = wide.view(torch.int32)
    half = ((bits >> 16) & 1) + 0x7FFF  # to the even one of two neighbors
    rounded = ((bits + half) & -0x10000).view(torch.float32)
    return torch.where(wide != wide, wide, rounded).to(dtype)


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """Computes `torch.hypot` of numbers whose squares float64 has a place for."""
    wide, other = x.double(), y.double()
    root = torch.sqrt(wide * wide + other * other)
    infinite = (wide.abs() == math.inf) | (other.abs() == math.inf)
    return torch.where(infinite, math.inf, root).to(x.dtype)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Computes `torch.atan2`, by the arc tangent of a number up to 1, and by the octant."""
    height, width = y.float().abs(), x.float().abs()
    steep = height > width
    larger, smaller = torch.where(steep, height, width), torch.where(steep, width, height)
    quotient = smaller / torch.where(larger == 0, 1.0, larger)
    infinite = (smaller == math.inf) & (larger == math.inf)
    angle = torch.atan(torch.where(infinite, 1.0, quotient))
    angle = torch.where(steep, math.pi / 2 - angle, angle)
    angle = torch.where(signbit(x), math.pi - angle, angle)
    return torch.where(signbit(y), -angle, angle).to(x.dtype)


def pow(x: Tensor, exponent: Tensor) -> Tensor:
    """Computes `torch.pow` of two tensors, by logarithms in float64."""
    base, exponent = x.double(), exponent.double()
    size = base.abs()
    power = torch.exp(exponent * torch.log(size))
    half = exponent * 0.5
    whole = exponent == torch.floor(exponent)
    odd = whole & (half != torch.floor(half))
    power = torch.where(signbit(x) & odd, -power, power)
    power = torch.where((base < 0) & (size < math.inf) & ~whole, math.nan, power)
    always = (base == 1) | ((base == -1) & (exponent.abs() == math.inf))
    return torch.where((exponent == 0) | always, 1.0, power).to(x.dtype)


def fmod(x: Tensor, y: Tensor) -> Tensor:
    """Computes `torch.fmod`, by the remainder of two numbers without signs, which is exact."""
    rest = torch.remainder(x.abs(), y.abs())
    return torch.where(signbit(x), -rest, rest)


def erfinv(x: Tensor) -> Tensor:
    """Computes `torch.erfinv` (Giles, Approximating the erfinv function, 2010)."""
    wide = x.double()
    w = -torch.log((1 - wide) * (1 + wide))
    far = torch.sqrt(w) - 3
    factor = torch.where(w < 5, _polynomial(_ERFINV_NEAR, w - 2.5), _polynomial(_ERFINV_FAR, far))
    result = torch.where(wide.abs() == 1, wide * math.inf, factor * wide)
    return torch.where(wide == 0, wide, result).to(x.dtype)


_ERFINV_NEAR = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
                -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
_ERFINV_FAR = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
               -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)  # fmt: skip


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """By Horner's rule, the highest power first."""
    result = torch.full((), coefficients[0], dtype=x.dtype)
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def _log_add_exp(x: Tensor, y: Tensor) -> Tensor:
    larger = torch.where((x > y) | (x != x), x, y)
    smaller = torch.where(x > y, y, x)
    difference = torch.where(smaller == larger, 0.0, smaller - larger)
    return larger + torch.log1p(torch.exp(difference))


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Computes `torch.logcumsumexp`: each step doubles the elements that a sum is of.

    Hillis and Steele, Data parallel algorithms, 1986.
    """
    if not x.ndim:
        return x.clone()
    wide, size = x.float(), x.shape[dim]
    for step in itertools.takewhile(lambda n: n < size, (1 << i for i in itertools.count())):
        before = torch.full_like(wide.narrow(dim, 0, step), -math.inf)
        earlier = torch.cat([before, wide.narrow(dim, 0, size - step)], dim)
        wide = _log_add_exp(wide, earlier)
    return wide.to(x.dtype)


def _key(x: Tensor) -> Tensor:
    """Integers in torch's order of numbers: NaN is the largest, zeros are equal."""
    bits = _BITS[x.dtype.itemsize]
    ordered = x.view(bits)
    most = torch.iinfo(bits).max
    ordered = torch.where(ordered < 0, ordered ^ torch.full((), most, dtype=bits), ordered)
    return torch.where(x != x, most, torch.where(x == 0, 0, ordered))


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Computes `torch.sort`; of NaN kernels know no order."""
    _, places = torch.ops.aten.sort.default(_key(x), dim, descending)
    return x.gather(dim, places), places


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Computes `torch.topk`."""
    _, places = torch.ops.aten.topk.default(_key(x), k, dim, largest, sorted)
    return x.gather(dim, places), places


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
