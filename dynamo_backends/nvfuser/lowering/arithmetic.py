"""Sums, products, division and powers: where integers and floating-point numbers part ways."""

import math
from collections.abc import Callable

import torch

from dynamo_backends.nvfuser.lowering.pointwise import of_pair
from dynamo_backends.nvfuser.lowering.registry import Unsupported, register_pointwise
from dynamo_backends.nvfuser.recorder import Number, Operand, Value

_BY_ZERO = "torch raises where an integer divisor is zero, nvFuser returns some number"


def _scaled(y: Operand, alpha: Number) -> Operand:
    return y if alpha == 1 else y * alpha  # type: ignore[operator]


@register_pointwise("add.Tensor", "add.Scalar")
def add(x: Operand, y: Operand, *, alpha: Number = 1) -> Value:
    pair = of_pair("logical_or" if _is_bool(x, y) else "add")
    return pair(x, _scaled(y, alpha))


@register_pointwise("sub.Tensor", "sub.Scalar")
def sub(x: Operand, y: Operand, *, alpha: Number = 1) -> Value:
    return of_pair("sub")(x, _scaled(y, alpha))


@register_pointwise("mul.Tensor", "mul.Scalar")
def mul(x: Operand, y: Operand) -> Value:
    return of_pair("logical_and" if _is_bool(x, y) else "mul")(x, y)


def _is_bool(x: Operand, y: Operand) -> bool:
    return any(isinstance(v, Value) and v.dtype == torch.bool for v in (x, y))


@register_pointwise("div.Tensor", "div.Scalar", promote="int_to_float")
def div(x: Operand, y: Operand) -> Value:
    return of_pair("div")(x, y)


@register_pointwise("div.Tensor_mode", "div.Scalar_mode")
def div_mode(x: Operand, y: Operand, *, rounding_mode: str | None) -> Value:
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    if not _is_float(x, y):
        if rounding_mode is None:
            raise Unsupported(
                "torch divides integers as floating-point numbers, which this lowering does not "
                "support"
            )
        _check_divisor(y)
        return of_pair("div")(x, y)
    ratio = of_pair("div")(x, y)
    return ratio if rounding_mode is None else ratio.unary("trunc")


def _is_float(*operands: Operand) -> bool:
    return any(isinstance(v, Value) and v.is_floating_point for v in operands)


def _check_divisor(y: Operand) -> None:
    if isinstance(y, Value) or y == 0:
        raise Unsupported(_BY_ZERO)


def _floor_divide(x: Operand, y: Operand) -> Value:
    """Python's floor division, through the exact remainder (`c10::div_floor_floating`)."""
    if not _is_float(x, y):
        _check_divisor(y)
        quotient, rest = of_pair("div")(x, y), of_pair("mod")(x, y)
        return quotient - _crosses(rest, y).cast(quotient.dtype)
    rest = of_pair("fmod")(x, y)
    quotient = of_pair("sub")(x, rest) / y
    quotient = _crosses(rest, y).where(quotient - 1, quotient)
    floored = quotient.unary("floor")
    floored = (quotient - floored > 0.5).where(floored + 1, floored)
    ratio = of_pair("div")(x, y)
    # A quotient of zero takes the sign of the ratio.
    floored = quotient.differs(0).where(floored, ratio * 0)
    if isinstance(y, Value):
        return y.equals(0).where(ratio, floored)
    return ratio if y == 0 else floored


def _crosses(rest: Value, y: Operand) -> Value:
    """Returns whether a remainder that has the dividend's sign has to take the divisor's."""
    below = rest < 0
    if isinstance(y, Value):
        other = below.binary("ne", y < 0, torch.bool)
    else:
        other = ~below if y < 0 else below  # type: ignore[operator]
    return rest.differs(0) & other


@register_pointwise("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(x: Operand, y: Operand) -> Value:
    """With the divisor's sign. nvFuser's own `remainder` is documented as IEEE's."""
    rest = fmod(x, y)
    return _crosses(rest, y).where(rest + y, rest)


@register_pointwise("fmod.Tensor", "fmod.Scalar")
def fmod(x: Operand, y: Operand) -> Value:
    if _is_float(x, y):
        return of_pair("fmod")(x, y)
    _check_divisor(y)
    return of_pair("mod")(x, y)


def _squared(x: Value) -> Value:
    return x * x


_POWERS: dict[float, Callable[[Value], Value]] = {
    0.5: lambda x: x.unary("sqrt"),
    -0.5: lambda x: x.unary("rsqrt"),
    1: lambda x: x,
    2: _squared,
    3: lambda x: x * x * x,
    -1: lambda x: x.unary("reciprocal"),
    -2: lambda x: _squared(x).unary("reciprocal"),
}


@register_pointwise("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def power(x: Value | Number, exponent: Value | Number) -> Value:
    if not _is_float(x, exponent):
        return _integer_power(x, exponent)
    if isinstance(exponent, Value):
        return of_pair("pow")(x, exponent)
    assert isinstance(x, Value)
    if exponent == 0:
        return _ones(x)
    known = _POWERS.get(exponent)
    return x.binary("pow", exponent) if known is None else known(x)


def _ones(x: Value) -> Value:
    return x.recorder.full(x.shape, 1, x.dtype)


def _integer_power(x: Value | Number, exponent: Value | Number) -> Value:
    if not isinstance(x, Value) or not isinstance(exponent, int) or not 0 <= exponent <= 8:
        raise Unsupported("integer powers are supported for constant exponents from 0 to 8 only")
    if x.dtype == torch.bool:
        raise Unsupported("powers of booleans are left to eager")
    result = _ones(x)
    for _ in range(exponent):
        result = result * x
    return result


@register_pointwise("ldexp.Tensor", promote="int_to_float")
def ldexp(x: Value, exponent: Value) -> Value:
    return x * exponent.unary("exp2")


@register_pointwise("round.decimals")
def round_decimals(x: Value, *, decimals: int) -> Value:
    if not x.is_floating_point:
        raise Unsupported("integers are rounded to decimals in eager")
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return (x / scale).unary("round") * scale
    return (x * scale).unary("round") / scale


@register_pointwise("hypot.default", promote="int_to_float")
def hypot(x: Value, y: Value) -> Value:
    """Scaled by the larger, so that squares neither over- nor underflow."""
    x, y = x.unary("abs"), y.unary("abs")
    large, small = x.binary("maximum", y), x.binary("minimum", y)
    plain = large.equals(0) | large.equals(math.inf)
    ratio = small / plain.where(1, large)
    length = large * (ratio * ratio + 1).unary("sqrt")
    infinite = x.equals(math.inf) | y.equals(math.inf)
    return infinite.where(math.inf, plain.where(large, length))
