"""Functions of elements for which nvFuser has an operation: exponentials, comparison, logic."""

import math
from collections.abc import Callable

import torch

from dynamo_backends.nvfuser.dtypes import compute_dtype
from dynamo_backends.nvfuser.lowering.registry import (
    Call,
    Unsupported,
    register_lowering,
    register_pointwise,
)
from dynamo_backends.nvfuser.recorder import Number, Operand, Value

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@register_pointwise("relu.default")
def relu(x: Value) -> Value:
    return (x < 0).where(0, x)


@register_pointwise("hardtanh.default", operands=1)
def hardtanh(x: Value, min_val: Number = -1, max_val: Number = 1) -> Value:
    x = (x < min_val).where(min_val, x)
    return (x > max_val).where(max_val, x)


@register_pointwise("leaky_relu.default", operands=1)
def leaky_relu(x: Value, negative_slope: Number = 0.01) -> Value:
    return (x > 0).where(x, x * negative_slope)


@register_pointwise("elu.default", operands=1)
def elu(x: Value, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Value:
    return (x > 0).where(x * scale, (x * input_scale).unary("expm1") * (alpha * scale))


@register_pointwise("gelu.default")
def gelu(x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inner = (x + x * x * x * _GELU_CUBIC) * _SQRT_2_OVER_PI
        return x * 0.5 * (inner.unary("tanh") + 1)
    return x * 0.5 * ((x * math.sqrt(0.5)).unary("erf") + 1)


_FLOAT_UNARY = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv",
    "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt",
    "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
_ROUNDING = ("ceil", "floor", "round", "trunc")
_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
_EXTREMES = ("maximum", "minimum")
_BITWISE = {
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "ne",
}
"""nvFuser's names for integers and for booleans."""
_LOGIC = {"logical_and": "logical_and", "logical_or": "logical_or", "logical_xor": "ne"}
_OVERLOADS = ("default", "Tensor", "Scalar", "Scalar_Tensor")


def _overloads(name: str) -> tuple[str, ...]:
    """Returns the overloads of a binary operator; those that it does not have do no harm."""
    return tuple(f"{name}.{overload}" for overload in _OVERLOADS)


def _unary(op: str) -> Callable[[Value], Value]:
    return lambda x: x.unary(op)


def _rounding(op: str) -> Callable[[Value], Value]:
    return lambda x: x.unary(op) if x.is_floating_point else x


def of_pair(op: str, dtype: torch.dtype | None = None) -> Callable[[Operand, Operand], Value]:
    """Returns a function that records a binary operation; one operand may be a number."""

    def apply(x: Operand, y: Operand) -> Value:
        value = x if isinstance(x, Value) else y
        assert isinstance(value, Value)
        return value.recorder.binary(op, x, y, dtype)

    return apply


def _comparison(op: str) -> Callable[[Operand, Operand], Value]:
    def apply(x: Operand, y: Operand) -> Value:
        x, y = _comparable(x, y)
        return of_pair(op, torch.bool)(x, y)

    return apply


def _comparable(x: Operand, y: Operand) -> tuple[Operand, Operand]:
    """Operands in a type that nvFuser compares: the halves as float32, which holds them all.

    A number is first rounded to the half, as eager does.
    """
    kind = next(v.dtype for v in (x, y) if isinstance(v, Value))
    if kind not in (torch.float16, torch.bfloat16):
        return x, y

    def widen(v: Operand) -> Operand:
        if isinstance(v, Value):
            return v.cast(torch.float32)
        return torch.tensor(v, dtype=kind).item()

    return widen(x), widen(y)


def _bitwise(op: str, of_booleans: str) -> Callable[[Operand, Operand], Value]:
    def apply(x: Operand, y: Operand) -> Value:
        kind = next(v.dtype for v in (x, y) if isinstance(v, Value))
        return of_pair(of_booleans if kind == torch.bool else op)(x, y)

    return apply


def truth(x: Operand) -> Operand:
    """Converts an operand to a boolean: True where it is not zero."""
    return x.cast(torch.bool) if isinstance(x, Value) else bool(x)


def _logic(op: str) -> Callable[[Operand, Operand], Value]:
    return lambda x, y: of_pair(op, torch.bool)(truth(x), truth(y))


for _name in _FLOAT_UNARY:
    register_pointwise(f"{_name}.default", promote="int_to_float")(_unary(_name))
for _name in _ROUNDING:
    register_pointwise(f"{_name}.default")(_rounding(_name))
for _name in _COMPARISONS:
    register_pointwise(*_overloads(_name), promote="to_bool")(_comparison(_name))
for _name in _EXTREMES:
    register_pointwise(f"{_name}.default")(of_pair(_name))
for _name, _of_booleans in _BITWISE.items():
    register_pointwise(*_overloads(_name))(_bitwise(_name, _of_booleans))
for _name, _op in _LOGIC.items():
    register_pointwise(*_overloads(_name), promote="to_bool")(_logic(_op))


@register_pointwise("abs.default", promote="complex_to_float")
def absolute(x: Value) -> Value:
    return x if x.dtype == torch.bool else x.unary("abs")


@register_pointwise("neg.default")
def neg(x: Value) -> Value:
    return -x


@register_pointwise("bitwise_not.default")
def bitwise_not(x: Value) -> Value:
    return ~x if x.dtype == torch.bool else x.unary("bitwise_not")


@register_pointwise("logical_not.default", promote="to_bool")
def logical_not(x: Value) -> Value:
    return ~x.cast(torch.bool)


@register_pointwise("sign.default")
def sign(x: Value) -> Value:
    """0 for NaN, as in torch."""
    if x.dtype == torch.bool:
        return x
    return (x > 0).cast(x.dtype) - (x < 0).cast(x.dtype)


@register_pointwise("isnan.default", promote="to_bool")
def isnan(x: Value) -> Value:
    x = _float(x)
    return x.differs(x)


@register_pointwise("isinf.default", promote="to_bool")
def isinf(x: Value) -> Value:
    x = _float(x)
    infinity = float("inf")
    return x.equals(infinity) | x.equals(-infinity)


def _float(x: Value) -> Value:
    """Returns a type that has NaN and infinities, and holds at least those of `x`."""
    return x if x.dtype == torch.float64 else x.cast(torch.float32)


@register_lowering("where.self", context=True)
def where(call: Call, condition: Value, x: Value, y: Value) -> Value:
    kind = compute_dtype(call.dtype)
    return condition.cast(torch.bool).where(x.cast(kind), y.cast(kind))


@register_pointwise("fmax.default")
def fmax(x: Value, y: Value) -> Value:
    return _unless_nan(x, y, "maximum")


@register_pointwise("fmin.default")
def fmin(x: Value, y: Value) -> Value:
    return _unless_nan(x, y, "minimum")


def _unless_nan(x: Value, y: Value, op: str) -> Value:
    """Returns the extreme of two numbers; if one is NaN, the other."""
    chosen = x.binary(op, y)
    if not x.is_floating_point:
        return chosen
    return x.differs(x).where(y, y.differs(y).where(x, chosen))


@register_pointwise("atan2.default", promote="int_to_float")
def atan2(x: Value, y: Value) -> Value:
    return x.binary("atan2", y)


@register_pointwise("copysign.Tensor", "copysign.Scalar", promote="int_to_float")
def copysign(x: Value, sign: Value | Number) -> Value:
    size = x.unary("abs")
    if isinstance(sign, Value):
        return sign.unary("signbit", torch.bool).where(-size, size)
    return -size if math.copysign(1, sign) < 0 else size


@register_pointwise("signbit.default", promote="to_bool")
def signbit(x: Value) -> Value:
    if x.is_floating_point:
        return x.cast(compute_dtype(x.dtype)).unary("signbit", torch.bool)
    return x < 0 if x.dtype != torch.bool else x & ~x


@register_lowering("nextafter.default")
def nextafter(x: Value, y: Value) -> Value:
    if compute_dtype(x.dtype) != x.dtype:
        raise Unsupported("nextafter for float16 and bfloat16 cannot be computed in float32")
    return x.binary("nextafter", y)


@register_pointwise("clamp.default")
def clamp(x: Value, min: Number | None = None, max: Number | None = None) -> Value:
    """`minimum(maximum(x, min), max)`: the upper bound wins where they cross; NaN stays."""
    return _clamp(x, min, max)


@register_pointwise("clamp.Tensor")
def clamp_tensor(x: Value, min: Value | None = None, max: Value | None = None) -> Value:
    return _clamp(x, min, max)


def _clamp(x: Value, low: Operand | None, high: Operand | None) -> Value:
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            x = _bounded(x, op, bound)
    return x


def _bounded(x: Value, op: str, bound: Operand) -> Value:
    if isinstance(bound, Value):
        return x.binary(op, bound)
    if bound != bound:
        raise Unsupported("a clamp bound is NaN")
    beyond = x < bound if op == "maximum" else x > bound
    return beyond.where(bound, x)
