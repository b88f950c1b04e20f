"""Arithmetic of 64-bit integers as pairs of 32-bit ones, by the operator."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import OpOverload

aten = torch.ops.aten
_LEAST = -(1 << 31)


class Int64Pair(NamedTuple):
    """64-bit integers as their lower and upper 32 bits, each an int32 tensor."""

    low: Tensor
    high: Tensor


def _constant(value: int, like: Tensor) -> Tensor:
    value &= 0xFFFFFFFF
    return like.new_full((), value - (1 << 32) if value >> 31 else value, dtype=torch.int32)


def _like(x: Any) -> Tensor:
    first: Tensor = x.low if isinstance(x, Int64Pair) else x
    return first


def _pair(x: Any, like: Tensor) -> Int64Pair:
    """Converts an integer tensor or number to a pair."""
    if isinstance(x, Int64Pair):
        return x
    if isinstance(x, Tensor):
        if x.is_floating_point():
            raise NotImplementedError("of floats")
        low = x.to(torch.int32)
        return Int64Pair(low, low >> 31)
    if not isinstance(x, int):
        raise NotImplementedError(f"with {x!r}")
    return Int64Pair(_constant(x, like), _constant(x >> 32, like))


def _on_pairs(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a rule so that its operands are pairs, converted if need be."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("alpha", 1) != 1 or kwargs:
            raise NotImplementedError(f"with {kwargs}")
        like = next(_like(x) for x in args if isinstance(x, Int64Pair | Tensor))
        return rule(*(_pair(x, like) for x in args))

    return call


def _halves(operator: Any) -> Callable[..., Any]:
    """Makes a rule that applies an operator to lower and upper halves separately."""

    def call(*args: Any, **kwargs: Any) -> Any:
        def half(i: int) -> Any:
            take = lambda x: x[i] if isinstance(x, Int64Pair) else x  # noqa: E731
            is_pair = lambda x: isinstance(x, Int64Pair)  # noqa: E731
            given, named = pytree.tree_map(take, (args, kwargs), is_leaf=is_pair)
            return operator(*given, **named)

        low, high = half(0), half(1)
        return Int64Pair(low, high) if isinstance(low, Tensor) else _zipped(low, high)

    return call


def _zipped(low: Any, high: Any) -> tuple[Int64Pair, ...]:
    return tuple(Int64Pair(*both) for both in zip(low, high, strict=True))


def _not_zero(x: Int64Pair) -> Tensor:
    return (x.low | x.high) != 0


def _is_negative(x: Int64Pair) -> Tensor:
    return x.high < 0


def _below(x: Tensor, y: Tensor) -> Tensor:
    """Returns x < y for unsigned 32-bit integers."""
    return (x + _LEAST) < (y + _LEAST)


def _add(x: Int64Pair, y: Int64Pair) -> Int64Pair:
    low = x.low + y.low
    return Int64Pair(low, x.high + y.high + _below(low, x.low).to(torch.int32))


def _sub(x: Int64Pair, y: Int64Pair) -> Int64Pair:
    borrow = _below(x.low, y.low).to(torch.int32)
    return Int64Pair(x.low - y.low, x.high - y.high - borrow)


def _neg(x: Int64Pair) -> Int64Pair:
    return Int64Pair(-x.low, ~x.high + (x.low == 0).to(torch.int32))


def _equal(x: Int64Pair, y: Int64Pair) -> Tensor:
    return ((x.low ^ y.low) | (x.high ^ y.high)) == 0


def _less(x: Int64Pair, y: Int64Pair) -> Tensor:
    return (x.high < y.high) | ((x.high == y.high) & _below(x.low, y.low))


def _choose(condition: Tensor, x: Int64Pair, y: Int64Pair) -> Int64Pair:
    return Int64Pair(*(torch.where(condition, a, b) for a, b in zip(x, y, strict=True)))


def _where(condition: Tensor, x: Any, y: Any) -> Int64Pair:
    return _on_pairs(functools.partial(_choose, condition))(x, y)


def _abs(x: Int64Pair) -> Int64Pair:
    return _choose(_is_negative(x), _neg(x), x)


def _max(x: Int64Pair, y: Int64Pair) -> Int64Pair:
    return _choose(_less(x, y), y, x)


def _min(x: Int64Pair, y: Int64Pair) -> Int64Pair:
    return _choose(_less(y, x), y, x)


def _clamp(x: Int64Pair, least: Any = None, most: Any = None, **named: Any) -> Int64Pair:
    x = _pair(x, _like(x))
    least, most = named.get("min", least), named.get("max", most)
    x = x if least is None else _max(x, _pair(least, x.low))
    return x if most is None else _min(x, _pair(most, x.low))


def _sign(x: Int64Pair) -> Int64Pair:
    low = torch.where(_is_negative(x), _constant(-1, x.low), _not_zero(x).to(torch.int32))
    return Int64Pair(low, low >> 31)


def _unsigned_shift(x: Tensor, count: int) -> Tensor:
    return (x >> count) & ((1 << (32 - count)) - 1) if count else x


def _left(x: Any, count: Any) -> Int64Pair:
    x = _pair(x, _like(x))
    zero = torch.zeros_like(x.low)
    if not 0 <= count < 64:
        return Int64Pair(zero, zero)
    if count >= 32:
        return Int64Pair(zero, x.low << (count - 32))
    if not count:
        return Int64Pair(*x)
    return Int64Pair(x.low << count, (x.high << count) | _unsigned_shift(x.low, 32 - count))


def _right(x: Any, count: Any) -> Int64Pair:
    x = _pair(x, _like(x))
    sign = x.high >> 31
    if not 0 <= count < 64:
        return Int64Pair(sign, sign)
    if count >= 32:
        return Int64Pair(x.high >> (count - 32), sign)
    if not count:
        return Int64Pair(*x)
    return Int64Pair(_unsigned_shift(x.low, count) | (x.high << (32 - count)), x.high >> count)


def _product(x: Tensor, y: Tensor) -> Int64Pair:
    """Multiplies unsigned 32-bit integers to 64 bits, by 16-bit halves."""
    x0, x1 = x & 0xFFFF, _unsigned_shift(x, 16)
    y0, y1 = y & 0xFFFF, _unsigned_shift(y, 16)
    least, mixed, other = x0 * y0, x0 * y1, x1 * y0
    middle = _unsigned_shift(least, 16) + (mixed & 0xFFFF) + (other & 0xFFFF)
    low = (middle << 16) | (least & 0xFFFF)
    carried = _unsigned_shift(mixed, 16) + _unsigned_shift(other, 16) + (middle >> 16)
    return Int64Pair(low, x1 * y1 + carried)


def _mul(x: Int64Pair, y: Int64Pair) -> Int64Pair:
    low, high = _product(x.low, y.low)
    return Int64Pair(low, high + x.high * y.low + x.low * y.high)


def _digits(x: Sequence[Tensor], bits: int) -> list[Tensor]:
    """Splits unsigned integers into 8- or 16-bit digits, the lowest first."""
    mask = (1 << bits) - 1
    return [(half >> at) & mask for half in x for at in range(0, 32, bits)]


def _from_digits(digits: list[Tensor], bits: int) -> Int64Pair:
    """Sums digits of up to 2**31, each times the power of its place, to a pair."""
    zero = torch.zeros_like(digits[0])
    parts = [_left(Int64Pair(digit, zero), bits * at) for at, digit in enumerate(digits)]
    return functools.reduce(_add, parts)


def _divided(x: Sequence[Tensor], by: int) -> tuple[Int64Pair, Tensor]:
    """Divides unsigned integers by a constant, digit by digit; also returns the rest."""
    if not 0 < by <= 1 << 16:
        raise NotImplementedError(f"by {by}")
    bits = 16 if by <= 256 else 8
    rest = torch.zeros_like(x[0], dtype=torch.float32)
    quotient: list[Tensor] = []
    for digit in reversed(_digits(x, bits)):
        rest = rest * float(1 << bits) + digit.to(torch.float32)
        whole = (rest / by).floor()
        rest = rest - whole * by  # a division may be off by one
        less, more = (rest < 0).to(torch.float32), (rest >= by).to(torch.float32)
        whole, rest = whole - less + more, rest + (less - more) * by
        quotient.insert(0, whole.to(torch.int32))
    return _from_digits(quotient, bits), rest.to(torch.int32)


def _div(x: Any, by: Any, *, rounding_mode: str | None) -> Int64Pair:
    if not isinstance(by, int) or rounding_mode is None:
        raise NotImplementedError(f"by {by!r}")
    x = _pair(x, _like(x))
    quotient, rest = _divided(_abs(x), abs(by))
    is_negative = _is_negative(x) if by > 0 else ~_is_negative(x)
    result = _choose(is_negative, _neg(quotient), quotient)
    if rounding_mode == "floor":
        down = (is_negative & (rest != 0)).to(torch.int32)
        result = _sub(result, Int64Pair(down, torch.zeros_like(down)))
    return result


def divide_int32(x: Tensor, by: int, rounding_mode: str) -> Tensor:
    """Divides int32 by a constant up to 2**16, exactly."""
    quotient, rest = _divided([x.abs()], abs(by))
    is_negative = x < 0 if by > 0 else x >= 0
    low = torch.where(is_negative, -quotient.low, quotient.low)
    return low - (is_negative & (rest != 0)).to(torch.int32) if rounding_mode == "floor" else low


def remainder_int32(x: Tensor, by: int, rounding_mode: str) -> Tensor:
    """Returns the exact remainder of int32 divided by a constant up to 2**16."""
    _, rest = _divided([x.abs()], abs(by))
    return _signed_rest(rest, x < 0, by, rounding_mode)


def _signed_rest(rest: Tensor, is_negative: Tensor, by: int, rounding_mode: str) -> Tensor:
    """Gives a remainder the sign of the dividend (trunc) or the divisor (floor)."""
    rest = torch.where(is_negative, -rest, rest)
    if rounding_mode == "trunc":
        return rest
    lacks = (rest < 0) if by > 0 else (rest > 0)
    return rest + torch.where(lacks, _constant(by, rest), torch.zeros_like(rest))


def _rest(rounding_mode: str) -> Callable[..., Int64Pair]:
    def rule(x: Any, by: Any) -> Int64Pair:
        if not isinstance(by, int):
            raise NotImplementedError(f"by {by!r}")
        x = _pair(x, _like(x))
        _, rest = _divided(_abs(x), abs(by))
        low = _signed_rest(rest, _is_negative(x), by, rounding_mode)
        return Int64Pair(low, low >> 31)

    return rule


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = _pair(x, _like(x))
    if dtype in (None, torch.int64):
        return x
    if dtype == torch.bool:
        return _not_zero(x)
    return _to_float(x).to(dtype) if dtype.is_floating_point else x.low.to(dtype)


def _to_float(x: Int64Pair) -> Tensor:
    """Converts a pair to the nearest float32.

    The sum of the first two is split into its rounded value and the rest. Of the third part, below
    all of the rest's bits, it matters only whether it is 0.
    """
    high = (x.high >> 12).to(torch.float32) * 2.0**44
    middle = (((x.high & 0xFFF) << 10) | _unsigned_shift(x.low, 22)).to(torch.float32) * 2.0**22
    low = (x.low & 0x3FFFFF).to(torch.float32)
    rounded = high + middle
    lost = middle - (rounded - high)
    is_more = (low > 0).to(torch.float32)
    return rounded + torch.where(lost == 0, low, lost + is_more * 2.0**21)


def _bits_for(count: int) -> int:
    """Returns the digit width, 8 or 16, whose sum over `count` items float32 holds."""
    if count > 1 << 16:
        raise NotImplementedError("a sum of so many integers")
    return 16 if count <= 1 << 8 else 8


def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Int64Pair:
    x = _pair(x, _like(x))
    dims = list(range(x.low.ndim)) if dim is None or dim == [] else dim
    count = x.low.numel() // max(x.low.sum(dims, keepdim).numel(), 1)
    bits = _bits_for(count)
    sums = [d.to(torch.float32).sum(dims, keepdim).to(torch.int32) for d in _digits(x, bits)]
    return _from_digits(sums, bits)


def _cumsum(x: Any, dim: int, *, dtype: Any = None) -> Int64Pair:
    x = _pair(x, _like(x))
    bits = _bits_for(x.low.shape[dim] if x.low.ndim else 1)
    sums = [d.to(torch.float32).cumsum(dim).to(torch.int32) for d in _digits(x, bits)]
    return _from_digits(sums, bits)


def _prod(x: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Int64Pair:
    x = _pair(x, _like(x))
    if dim is None:
        x, dim = Int64Pair(*(half.reshape(-1) for half in x)), 0
    if not x.low.ndim:
        return Int64Pair(*x)
    while (size := x.low.shape[dim]) > 1:
        first, second, odd = (
            Int64Pair(*(half.narrow(dim, start, length) for half in x))
            for start, length in ((0, size // 2), (size // 2, size // 2), (size - 1, size % 2))
        )
        x = _mul(first, second)
        if size % 2:
            x = Int64Pair(*(torch.cat(both, dim) for both in zip(x, odd, strict=True)))
    return x if keepdim else Int64Pair(*(half.squeeze(dim) for half in x))


def _extreme(is_max: bool) -> Callable[..., Int64Pair]:
    def rule(x: Int64Pair, dim: Any = (), keepdim: bool = False) -> Int64Pair:
        find: Any = torch.amax if is_max else torch.amin
        dims = list(dim) if isinstance(dim, list | tuple) else [dim]
        dims = dims or list(range(x.low.ndim))
        if not x.low.ndim:
            return Int64Pair(*x)
        first = find(x.high, dims, True)
        worst = _constant(_LEAST if is_max else ~_LEAST, x.low)
        second = find(torch.where(x.high == first, x.low + _LEAST, worst), dims, True) + _LEAST
        if keepdim:
            return Int64Pair(second, first)
        return Int64Pair(second.squeeze(dims), first.squeeze(dims))

    return rule


def _with_position(is_max: bool) -> Callable[..., tuple[Int64Pair, Tensor]]:
    def rule(x: Int64Pair, dim: int, keepdim: bool = False) -> tuple[Int64Pair, Tensor]:
        if not x.low.ndim:
            raise NotImplementedError
        values = _extreme(is_max)(x, dim, True)
        position = aten.argmax.default(_equal(x, values).to(torch.float32), dim, keepdim)
        return values if keepdim else Int64Pair(*(h.squeeze(dim) for h in values)), position

    return rule


_MOVES = (
    aten._unsafe_view.default, aten.alias.default, aten.as_strided.default, aten.cat.default,
    aten.clone.default, aten.constant_pad_nd.default, aten.detach.default, aten.diagonal.default,
    aten.expand.default, aten.flip.default, aten.gather.default, aten.index.Tensor,
    aten.index_select.default, aten.lift_fresh_copy.default, aten.permute.default,
    aten.repeat.default, aten.reshape.default, aten.roll.default, aten.select.int,
    aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.stack.default, aten.t.default,
    aten.transpose.int, aten.tril.default, aten.triu.default, aten.unbind.int,
    aten.unsqueeze.default, aten.view.default,
)  # fmt: skip
"""Operators whose results are elements of their operands, or 0."""


def _bitwise(operate: Callable[..., Tensor]) -> Callable[..., Int64Pair]:
    return _on_pairs(lambda *args: Int64Pair(*(operate(*both) for both in zip(*args, strict=True))))


RULES: Mapping[OpOverload, Callable[..., Any]] = {
    **{target: _halves(target) for target in _MOVES},
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.bitwise_and.Scalar), _bitwise(operator.and_)),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.bitwise_or.Scalar), _bitwise(operator.or_)),
    **dict.fromkeys((aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar), _bitwise(operator.xor)),
    aten.bitwise_not.default: _bitwise(operator.invert),
    **dict.fromkeys((aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar), _left),
    **dict.fromkeys((aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar), _right),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _on_pairs(_add)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _on_pairs(_sub)),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), _on_pairs(lambda x, y: _sub(y, x))),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _on_pairs(_mul)),
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _on_pairs(_equal)),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _on_pairs(lambda x, y: ~_equal(x, y))),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _on_pairs(_less)),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), _on_pairs(lambda x, y: _less(y, x))),
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _on_pairs(lambda x, y: ~_less(y, x))),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _on_pairs(lambda x, y: ~_less(x, y))),
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _div),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _rest("floor")),
    **dict.fromkeys((aten.fmod.Scalar, aten.fmod.Tensor), _rest("trunc")),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _sum),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), _prod),
    **dict.fromkeys((aten.clamp.default, aten.clamp.Tensor), _clamp),
    aten._to_copy.default: _to_copy,
    aten.abs.default: _on_pairs(_abs),
    aten.amax.default: _extreme(True),
    aten.amin.default: _extreme(False),
    aten.clamp_max.default: lambda x, most: _clamp(x, None, most),
    aten.clamp_min.default: lambda x, least: _clamp(x, least),
    aten.cumsum.default: _cumsum,
    aten.logical_not.default: _on_pairs(lambda x: ~_not_zero(x)),
    aten.masked_fill.Scalar: lambda x, mask, value: _where(mask, value, x),
    aten.masked_fill.Tensor: lambda x, mask, value: _where(mask, value, x),
    aten.max.dim: _with_position(True),
    aten.maximum.default: _on_pairs(_max),
    aten.min.dim: _with_position(False),
    aten.minimum.default: _on_pairs(_min),
    aten.neg.default: _on_pairs(_neg),
    aten.relu.default: _on_pairs(lambda x: _max(x, _pair(0, x.low))),
    aten.sgn.default: _on_pairs(_sign),
    aten.sign.default: _on_pairs(_sign),
    aten.where.self: _where,
}
"""What calls become, by the operator: of pairs in the place of 64-bit integers."""
