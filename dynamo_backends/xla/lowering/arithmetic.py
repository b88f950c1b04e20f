"""Division, rounding to decimals, powers and shifts: where integers and floats part ways.

torch raises where an integer divisor is zero. XLA does not, so integer divisions have a lowering
only where the divisor is known not to be zero.
"""

import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import fx

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.pointwise import flush, is_integral
from dynamo_backends.xla.lowering.registry import Promotion, pointwise


def _true_divide(x: Array, y: Array) -> Array:
    # XLA turns a division by one number into a multiplication by its rounded reciprocal, and then
    # 41 / 41 < 1: fatal under a later floor. A divisor that seems to depend on x prevents that.
    if y.size == 1 and jnp.issubdtype(x.dtype, jnp.floating):
        y = jnp.where(jnp.isnan(x), x, y)
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
    return lax.div(*jnp.broadcast_arrays(x, y)) if is_integral(x) else jnp.trunc(_true_divide(x, y))


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
    floored = jnp.where(quotient != 0, floored, jnp.copysign(jnp.zeros_like(ratio), ratio))
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


@pointwise("round.decimals")
def round_decimals(x: Array, *, decimals: int) -> Array:
    if decimals == 0 or is_integral(x):
        return x if is_integral(x) else jnp.round(x)
    scale = jnp.asarray(10.0 ** abs(decimals), x.dtype)
    return (
        _true_divide(jnp.round(x * scale), scale)
        if decimals > 0
        else jnp.round(_true_divide(x, scale)) * scale
    )


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
    if isinstance(constant, int | float):
        if constant == 0:
            return jnp.ones_like(x)
        if constant in _POWERS:
            return _POWERS[constant](x)
    return jnp.power(flush(x), flush(exponent))


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


# Dynamo makes it of `addcmul_` and the like with a number in a tensor; torch knows it only then.
@pointwise("prims::fma.default")
def fma(x: Array, y: Array, z: Array) -> Array:
    if x.dtype == jnp.float32:  # float64 holds the product of two float32 exactly
        x, y, z = (a.astype(jnp.float64) for a in (x, y, z))
    return x * y + z
