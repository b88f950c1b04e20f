"""Elementwise sums and products, comparison, logic, rounding, exponentials and trigonometry.

Most operators are rows of a table. XLA's own elementwise functions propagate NaN and keep signed
zeros as torch does; what differs has a function of its own below.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import torch
from jax import Array, lax

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Promotion, register_lowering, register_pointwise


def is_integral(x: Array) -> bool:
    """Returns whether an array holds integers or booleans."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


# Cephes' tanhf: tanh(x) = x + x**3 * p(x**2) for small x.
_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def _tanh(x: Array) -> Array:
    """Computes float32 by exp: XLA's own is wrong by 4.4 units in the last place near 1 and -1.

    Gradients are multiplied by 1 - tanh(x)**2, which is nothing but that rounding there.
    """
    if x.dtype != jnp.float32:
        return jnp.tanh(x)
    squared = x * x
    polynomial = jnp.zeros_like(x)
    for coefficient in _TANH:
        polynomial = polynomial * squared + coefficient
    series = x * (1 + squared * polynomial)
    size = jnp.abs(x)
    return jnp.where(size > 0.625, jnp.sign(x) * (1 - 2 / (jnp.exp(2 * size) + 1)), series)


def expm1(x: Array) -> Array:
    """exp(x) - 1; in float32 a series near 0, where XLA's own is wrong by 5 units."""
    if x.dtype != jnp.float32:
        return jnp.expm1(x)
    series = jnp.zeros_like(x)
    for factor in (8, 7, 6, 5, 4, 3, 2):
        series = series * x + 1 / math.factorial(factor)
    return jnp.where(jnp.abs(x) < 0.5, x * (1 + x * series), jnp.exp(x) - 1)


_SHIFT = 0.625  # exp(0.625) / 2 is a float32 number but for 1e-9 of it
_HALF = math.exp(_SHIFT) / 2
# Cephes' sinhf: sinh(x) = x + x**3 * p(x**2) for small x.
_SINH = (2.03721912945e-4, 8.33028376239e-3, 1.66667160211e-1)


def _half_exp(x: Array) -> Array:
    """exp(x) / 2 of float32 numbers from 1 on: the difference is exact, and x may be above 88.7."""
    return jnp.exp(x - _SHIFT) * _HALF


def _cosh(x: Array) -> Array:
    if x.dtype != jnp.float32:
        return jnp.cosh(x)
    half = _half_exp(jnp.abs(x))
    return half + 0.25 / half


def _sinh(x: Array) -> Array:
    """Computes float32 by exp: XLA's own is wrong by 24 units in the last place of large x."""
    if x.dtype != jnp.float32:
        return jnp.sinh(x)
    size, squared = jnp.abs(x), x * x
    half = _half_exp(size)
    polynomial = jnp.zeros_like(x)
    for coefficient in _SINH:
        polynomial = polynomial * squared + coefficient
    return jnp.where(size < 1, x + x * squared * polynomial, jnp.copysign(half - 0.25 / half, x))


def flush(x: Array) -> Array:
    """Replaces denormal numbers by zeros of the same sign.

    XLA's programs take these for 0 on CPUs, but some of its functions read bits: then the logarithm
    of 1e-40 is neither that of it nor that of 0.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).tiny, x * 0, x)


def _log(x: Array) -> Array:
    return jnp.log(flush(x))


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


_Table = dict[str, Callable[..., Array]]

_FLOAT_UNARY: _Table = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": lambda x: jnp.where(jnp.abs(x) < 1e-4, x, jnp.arcsin(x)),
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": _cosh,
    "exp": jnp.exp,
    "exp2": _exp2,
    "expm1": expm1,
    "log": _log,
    "log10": lambda x: jnp.log10(flush(x)),
    "log1p": jnp.log1p,
    "log2": lambda x: jnp.log2(flush(x)),
    "reciprocal": jnp.reciprocal,
    "rsqrt": lax.rsqrt,
    "sigmoid": lax.logistic,
    "sin": jnp.sin,
    "sinh": _sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": _tanh,
}
_UNARY: _Table = {
    "bitwise_not": jnp.bitwise_not,
    "neg": jnp.negative,
    "sign": _sign,
    "square": jnp.square,
}
_ROUNDING: _Table = {
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "round": jnp.round,
    "trunc": jnp.trunc,
}
_TESTS: _Table = {
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "logical_not": jnp.logical_not,
    "signbit": _signbit,
}
_BINARY: _Table = {
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
_FLOAT_BINARY: _Table = {
    "atan2": lambda x, y: jnp.arctan2(flush(x), flush(y)),
    "copysign": jnp.copysign,
    "hypot": jnp.hypot,
}
_COMPARISONS: _Table = {
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
    """Returns the overloads of a binary operator: one packet has some of these."""
    packet = getattr(torch.ops.aten, name)
    kinds = ("default", "Tensor", "Scalar", "Scalar_Tensor")
    return tuple(f"{name}.{kind}" for kind in kinds if kind in packet.overloads())


for _name, _fn in _FLOAT_UNARY.items():
    register_pointwise(f"{_name}.default", promote=Promotion.INT_TO_FLOAT)(_fn)
for _name, _fn in _UNARY.items():
    register_pointwise(f"{_name}.default")(_fn)
for _name, _fn in _TESTS.items():
    register_pointwise(f"{_name}.default", promote=Promotion.TO_BOOL)(_fn)
for _name, _fn in _BINARY.items():
    register_pointwise(*_binary_names(_name))(_fn)
for _name, _fn in _FLOAT_BINARY.items():
    register_pointwise(*_binary_names(_name), promote=Promotion.INT_TO_FLOAT)(_fn)
for _name, _fn in _COMPARISONS.items():
    register_pointwise(*_binary_names(_name), promote=Promotion.TO_BOOL)(_fn)
for _name, _fn in _ROUNDING.items():
    register_pointwise(f"{_name}.default")(lambda x, fn=_fn: x if is_integral(x) else fn(x))


@register_pointwise("abs.default", promote=Promotion.COMPLEX_TO_FLOAT)
def absolute(x: Array) -> Array:
    return jnp.abs(x)


@register_pointwise("add.Tensor", "add.Scalar")
def add(ctx: Context, x: Array, y: Array, *, alpha: float = 1) -> Array:
    number = ctx.node.args[1]
    if isinstance(number, int | float) and jnp.issubdtype(x.dtype, jnp.floating):
        added = float(number) * alpha
        if added == 0 and math.copysign(1, added) > 0:
            # XLA drops the addition of 0, which makes 0.0 of -0.0.
            return jnp.where(x == 0, jnp.zeros_like(x), x)
    return x + y * alpha if alpha != 1 else x + y


@register_pointwise("sub.Tensor", "sub.Scalar")
def sub(x: Array, y: Array, *, alpha: float = 1) -> Array:
    return x - y * alpha if alpha != 1 else x - y


@register_pointwise("rsub.Tensor", "rsub.Scalar")
def rsub(x: Array, y: Array, *, alpha: float = 1) -> Array:
    return sub(y, x, alpha=alpha)


def _is_one(value: float | Array) -> bool:
    """Returns whether a number is 1; of one that is an input of the program that is not known."""
    return not isinstance(value, Array) and value == 1


@register_pointwise("addcmul.default", operands=slice(0, 3))
def addcmul(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + (a * b if _is_one(value) else a * b * value)


@register_pointwise("addcdiv.default", operands=slice(0, 3))
def addcdiv(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + (a / b if _is_one(value) else value * (a / b))


@register_pointwise("lerp.Tensor", "lerp.Scalar")
def lerp(x: Array, end: Array, weight: Array) -> Array:
    """Exact at both ends, as `at::native::lerp`."""
    near = jnp.abs(weight) < 0.5
    return jnp.where(near, x + weight * (end - x), end - (end - x) * (1 - weight))


@register_pointwise("where.self", operands=slice(1, 3))
def where(condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition.astype(jnp.bool_), x, y)


@register_pointwise("clamp.default", "clamp.Tensor")
def clamp(x: Array, lower: Array | None = None, upper: Array | None = None) -> Array:
    """`min(max(x, lower), upper)`: the upper bound wins where they cross; NaN stays."""
    if lower is not None:
        x = jnp.maximum(x, lower)
    return x if upper is None else jnp.minimum(x, upper)


@register_pointwise("ldexp.Tensor", promote=Promotion.INT_TO_FLOAT)
def ldexp(x: Array, exponent: Array) -> Array:
    return x * _exp2(exponent)


@register_pointwise("nextafter.default", promote=Promotion.NONE)
def nextafter(ctx: Context, x: Array, y: Array) -> Array:
    """Computes in the operands' own precision: a bfloat16's neighbour is not one in float32."""
    return jnp.nextafter(x.astype(ctx.out_dtype), y.astype(ctx.out_dtype))


@register_lowering("frexp.Tensor")
def frexp(x: Array) -> tuple[Array, Array]:
    return jnp.frexp(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x)
