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
from dynamo_backends.xla.lowering.registry import Promotion, lowers, pointwise


def is_integral(x: Array) -> bool:
    """Whether an array holds integers or booleans."""
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
    """In float32 by exp: XLA's own is wrong by 4.4 units in the last place near 1 and -1.

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
_FLOAT_BINARY: _Table = {"atan2": jnp.arctan2, "copysign": jnp.copysign, "hypot": jnp.hypot}
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
def add(ctx: Context, x: Array, y: Array, *, alpha: float = 1) -> Array:
    number = ctx.node.args[1]
    if isinstance(number, int | float) and jnp.issubdtype(x.dtype, jnp.floating):
        added = float(number) * alpha
        if added == 0 and math.copysign(1, added) > 0:
            # XLA drops the addition of 0, which makes 0.0 of -0.0.
            return jnp.where(x == 0, jnp.zeros_like(x), x)
    return x + y * alpha if alpha != 1 else x + y


@pointwise("sub.Tensor", "sub.Scalar")
def sub(x: Array, y: Array, *, alpha: float = 1) -> Array:
    return x - y * alpha if alpha != 1 else x - y


@pointwise("rsub.Tensor", "rsub.Scalar")
def rsub(x: Array, y: Array, *, alpha: float = 1) -> Array:
    return sub(y, x, alpha=alpha)


def _is_one(value: float | Array) -> bool:
    """Whether a number is 1; of one that is an input of the program that is not known."""
    return not isinstance(value, Array) and value == 1


@pointwise("addcmul.default", operands=slice(0, 3))
def addcmul(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + (a * b if _is_one(value) else a * b * value)


@pointwise("addcdiv.default", operands=slice(0, 3))
def addcdiv(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + (a / b if _is_one(value) else value * (a / b))


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
