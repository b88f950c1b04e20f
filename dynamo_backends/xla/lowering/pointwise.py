"""Elementwise arithmetic, comparison, logic, rounding, exponentials and trigonometry.

Most operators are rows of a table. XLA's own elementwise functions propagate NaN and keep signed
zeros as torch does; what differs has a function of its own below.
"""

import math

import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import fx

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Promotion, lowers, pointwise


def is_integral(x: Array) -> bool:
    """Whether an array holds integers or booleans."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def _sign(x: Array) -> Array:
    if x.dtype == jnp.bool_:
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)  # 0 for NaN, as in torch


def _exp2(x: Array) -> Array:
    """2**x by splitting off the integer part: `exp(x * ln 2)` loses five bits for large x."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.exp(x * math.log(2.0))
    bound = 300.0 if x.dtype == jnp.float32 else 2200.0
    x = jnp.clip(x, -bound, bound)
    whole = jnp.round(x)
    # Two factors, so that neither over- nor underflows before the product does.
    half = jnp.floor(whole / 2).astype(jnp.int32)
    rest = whole.astype(jnp.int32) - half
    return jnp.ldexp(jnp.ldexp(jnp.exp((x - whole) * math.log(2.0)), half), rest)


def _signbit(x: Array) -> Array:
    return x < 0 if is_integral(x) and x.dtype != jnp.bool_ else jnp.signbit(x)


_FLOAT_UNARY = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "exp": jnp.exp,
    "exp2": _exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "reciprocal": jnp.reciprocal,
    "rsqrt": lax.rsqrt,
    "sigmoid": lax.logistic,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}
_UNARY = {
    "bitwise_not": jnp.bitwise_not,
    "neg": jnp.negative,
    "sign": _sign,
    "square": jnp.square,
}
_ROUNDING = {
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "round": jnp.round,
    "trunc": jnp.trunc,
}
_TESTS = {
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "logical_not": jnp.logical_not,
    "signbit": _signbit,
}
_BINARY = {
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "gcd": jnp.gcd,
    "lcm": jnp.lcm,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "mul": jnp.multiply,
}
_FLOAT_BINARY = {"atan2": jnp.arctan2, "copysign": jnp.copysign, "hypot": jnp.hypot}
_COMPARISONS = {
    "eq": jnp.equal,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "lt": jnp.less,
    "ne": jnp.not_equal,
}


def _binary_names(name: str) -> tuple[str, ...]:
    """The overloads of a binary operator: one packet has some of these."""
    packet = getattr(torch.ops.aten, name)
    kinds = ("default", "Tensor", "Scalar", "Scalar_Tensor")
    return tuple(f"{name}.{kind}" for kind in kinds if kind in packet.overloads())


for _name, _fn in _FLOAT_UNARY.items():
    pointwise(f"{_name}.default", promote=Promotion.INT_TO_FLOAT)(_fn)
for _name, _fn in _UNARY.items():
    pointwise(f"{_name}.default")(_fn)
for _name, _fn in _TESTS.items():
    pointwise(f"{_name}.default", promote=Promotion.TO_BOOL)(_fn)
for _name, _fn in _BINARY.items():
    pointwise(*_binary_names(_name))(_fn)
for _name, _fn in _FLOAT_BINARY.items():
    pointwise(*_binary_names(_name), promote=Promotion.INT_TO_FLOAT)(_fn)
for _name, _fn in _COMPARISONS.items():
    pointwise(*_binary_names(_name), promote=Promotion.TO_BOOL)(_fn)
for _name, _fn in _ROUNDING.items():
    pointwise(f"{_name}.default")(lambda x, fn=_fn: x if is_integral(x) else fn(x))


@pointwise("abs.default", promote=Promotion.COMPLEX_TO_FLOAT)
def absolute(x: Array) -> Array:
    return jnp.abs(x)


@pointwise("add.Tensor", "add.Scalar")
def add(x: Array, y: Array, *, alpha: float = 1) -> Array:
    return x + y * alpha if alpha != 1 else x + y


@pointwise("sub.Tensor", "sub.Scalar")
def sub(x: Array, y: Array, *, alpha: float = 1) -> Array:
    return x - y * alpha if alpha != 1 else x - y


@pointwise("rsub.Tensor", "rsub.Scalar")
def rsub(x: Array, y: Array, *, alpha: float = 1) -> Array:
    return sub(y, x, alpha=alpha)


@pointwise("addcmul.default", operands=slice(0, 3))
def addcmul(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + (a * b if value == 1 else a * b * value)


@pointwise("addcdiv.default", operands=slice(0, 3))
def addcdiv(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + (a / b if value == 1 else value * (a / b))


@pointwise("lerp.Tensor", "lerp.Scalar")
def lerp(x: Array, end: Array, weight: Array) -> Array:
    """Exact at both ends, as `at::native::lerp`."""
    near = jnp.abs(weight) < 0.5
    return jnp.where(near, x + weight * (end - x), end - (end - x) * (1 - weight))


@pointwise("where.self", operands=slice(1, 3))
def where(condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition.astype(jnp.bool_), x, y)


@pointwise("clamp.default", "clamp.Tensor")
def clamp(x: Array, lower: Array | None = None, upper: Array | None = None) -> Array:
    """`min(max(x, lower), upper)`: the upper bound wins where they cross; NaN stays."""
    if lower is not None:
        x = jnp.maximum(x, lower)
    return x if upper is None else jnp.minimum(x, upper)


def _true_divide(x: Array, y: Array) -> Array:
    # XLA turns a division by one number into a multiplication by its rounded reciprocal, and then
    # 41 / 41 < 1: fatal under a later floor. The barrier hides that it is one number; it is gone
    # before XLA fuses.
    if y.size == 1 and jnp.issubdtype(x.dtype, jnp.floating):
        y = lax.optimization_barrier(
            jnp.broadcast_to(y, jnp.broadcast_shapes(x.shape, y.shape))
        )
    return x / y


def _integer_divisor(node: fx.Node) -> str | None:
    """torch raises on an integer division by zero; XLA returns some number."""
    if node.meta["val"].dtype.is_floating_point:
        return None
    divisor = node.args[1]
    if isinstance(divisor, fx.Node) and divisor.target in (
        torch.ops.aten.full.default,
        torch.ops.aten.scalar_tensor.default,
    ):
        divisor = divisor.args[-1]
    if isinstance(divisor, int | float) and divisor != 0:
        return None
    return "torch raises where an integer divisor is zero, XLA cannot"


@pointwise("div.Tensor", "div.Scalar", promote=Promotion.INT_TO_FLOAT)
def div(x: Array, y: Array) -> Array:
    return _true_divide(x, y)


def _integer_divisor_unless_true(node: fx.Node) -> str | None:
    return _integer_divisor(node) if node.kwargs.get("rounding_mode") else None


@pointwise("div.Tensor_mode", "div.Scalar_mode", when=_integer_divisor_unless_true)
def div_mode(ctx: Context, x: Array, y: Array, *, rounding_mode: str | None) -> Array:
    if rounding_mode is None:
        if is_integral(x):
            x, y = x.astype(ctx.out_dtype), y.astype(ctx.out_dtype)
        return _true_divide(x, y)
    if rounding_mode == "floor":
        return floor_divide(x, y)
    return (
        lax.div(*jnp.broadcast_arrays(x, y))
        if is_integral(x)
        else jnp.trunc(_true_divide(x, y))
    )


@pointwise("floor_divide.default", "floor_divide.Scalar", when=_integer_divisor)
def floor_divide(x: Array, y: Array) -> Array:
    """Python's floor division, through the exact remainder (`c10::div_floor_floating`)."""
    if is_integral(x):
        return jnp.floor_divide(x, y)
    ratio = _true_divide(x, y)
    rest = jnp.fmod(x, y)
    quotient = _true_divide(x - rest, y)
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(
        quotient != 0, floored, jnp.copysign(jnp.zeros_like(ratio), ratio)
    )
    return jnp.where(y == 0, ratio, floored)


@pointwise(
    "remainder.Tensor",
    "remainder.Scalar",
    "remainder.Scalar_Tensor",
    when=_integer_divisor,
)
def remainder(x: Array, y: Array) -> Array:
    return jnp.remainder(x, y)


@pointwise("fmod.Tensor", "fmod.Scalar", when=_integer_divisor)
def fmod(x: Array, y: Array) -> Array:
    return lax.rem(*jnp.broadcast_arrays(x, y))


_POWERS = {
    0.5: jnp.sqrt,
    -0.5: lax.rsqrt,
    1: lambda x: x,
    2: jnp.square,
    3: lambda x: x * x * x,
    -1: jnp.reciprocal,
    -2: lambda x: jnp.reciprocal(jnp.square(x)),
}


def _negative_power(node: fx.Node) -> str | None:
    exponent = node.args[1]
    negative = isinstance(exponent, int | float) and exponent < 0
    if negative and not node.meta["val"].dtype.is_floating_point:
        return "torch refuses integers to negative integer powers"
    return None


@pointwise("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar", when=_negative_power)
def power(ctx: Context, x: Array, exponent: Array) -> Array:
    if is_integral(x):
        return _integer_power(x, exponent)
    constant = ctx.node.args[1]
    if not isinstance(constant, fx.Node) and constant in _POWERS:
        return _POWERS[constant](x)
    if not isinstance(constant, fx.Node) and constant == 0:
        return jnp.ones_like(x)
    return jnp.power(x, exponent)


def _integer_power(x: Array, exponent: Array) -> Array:
    """Square and multiply with wrap-around (`at::native::powi`)."""
    x, exponent = jnp.broadcast_arrays(x, exponent)
    if x.dtype == jnp.bool_:
        return x | ~exponent

    def step(_: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        base, rest, result = state
        return base * base, rest >> 1, jnp.where(rest & 1 == 1, result * base, result)

    bits = jnp.iinfo(x.dtype).bits
    magnitude = jnp.maximum(exponent, 0)
    result = lax.fori_loop(0, bits, step, (x, magnitude, jnp.ones_like(x)))[2]
    if jnp.iinfo(x.dtype).min == 0:
        return result
    odd = jnp.where(exponent & 1 == 1, -1, 1).astype(x.dtype)
    inverse = jnp.where(x == 1, 1, jnp.where(x == -1, odd, 0)).astype(x.dtype)
    return jnp.where(exponent < 0, inverse, result)


@pointwise("round.decimals")
def round_decimals(x: Array, *, decimals: int) -> Array:
    if decimals == 0 or is_integral(x):
        return x if is_integral(x) else jnp.round(x)
    scale = jnp.asarray(10.0 ** abs(decimals), x.dtype)
    return (
        jnp.round(x * scale) / scale if decimals > 0 else jnp.round(x / scale) * scale
    )


_SHIFT_OVERLOADS = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")


def _broadcast(x: Array, y: Array) -> list[Array]:
    return jnp.broadcast_arrays(x, y)


@pointwise(*(f"bitwise_left_shift.{o}" for o in _SHIFT_OVERLOADS))
@pointwise("__lshift__.Tensor", "__lshift__.Scalar")
def left_shift(x: Array, y: Array) -> Array:
    """Shifts by a negative amount or by the width and more give 0, in torch and in XLA."""
    if not is_integral(x):
        return x * jnp.exp2(y)
    return lax.shift_left(*_broadcast(x, y))


@pointwise(*(f"bitwise_right_shift.{o}" for o in _SHIFT_OVERLOADS))
@pointwise("__rshift__.Tensor", "__rshift__.Scalar")
def right_shift(x: Array, y: Array) -> Array:
    """Shifts by a negative amount or by the width and more leave only the sign."""
    if not is_integral(x):
        return x / jnp.exp2(y)
    if jnp.iinfo(x.dtype).min == 0:
        return lax.shift_right_logical(*_broadcast(x, y))
    return lax.shift_right_arithmetic(*_broadcast(x, y))


@pointwise("ldexp.Tensor", promote=Promotion.INT_TO_FLOAT)
def ldexp(x: Array, exponent: Array) -> Array:
    return x * _exp2(exponent)


@pointwise("nextafter.default", promote=Promotion.NONE)
def nextafter(ctx: Context, x: Array, y: Array) -> Array:
    """In the operands' own precision: the neighbour of a bfloat16 is not one in float32."""
    return jnp.nextafter(x.astype(ctx.out_dtype), y.astype(ctx.out_dtype))


@lowers("frexp.Tensor")
def frexp(x: Array) -> tuple[Array, Array]:
    return jnp.frexp(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x)
