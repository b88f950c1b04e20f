"""Division, rounding, powers and shifts; activation functions and gradients; complex parts.

torch raises where an integer divisor is zero. XLA does not, so integer divisions have a lowering
only where the divisor is known not to be zero.
"""

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from torch import fx

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.pointwise import expm1, flush, is_integral
from dynamo_backends.xla.lowering.registry import Promotion, register_pointwise


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


@register_pointwise("div.Tensor", "div.Scalar", promote=Promotion.INT_TO_FLOAT)
def div(x: Array, y: Array) -> Array:
    return _true_divide(x, y)


def _integer_divisor_unless_true(node: fx.Node) -> str | None:
    return _integer_divisor(node) if node.kwargs.get("rounding_mode") else None


@register_pointwise("div.Tensor_mode", "div.Scalar_mode", when=_integer_divisor_unless_true)
def div_mode(ctx: Context, x: Array, y: Array, *, rounding_mode: str | None) -> Array:
    if rounding_mode is None:
        if is_integral(x):
            x, y = x.astype(ctx.out_dtype), y.astype(ctx.out_dtype)
        return _true_divide(x, y)
    if rounding_mode == "floor":
        return floor_divide(x, y)
    return lax.div(*jnp.broadcast_arrays(x, y)) if is_integral(x) else jnp.trunc(_true_divide(x, y))


@register_pointwise("floor_divide.default", "floor_divide.Scalar", when=_integer_divisor)
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


@register_pointwise(
    "remainder.Tensor",
    "remainder.Scalar",
    "remainder.Scalar_Tensor",
    when=_integer_divisor,
)
def remainder(x: Array, y: Array) -> Array:
    return jnp.remainder(x, y)


@register_pointwise("fmod.Tensor", "fmod.Scalar", when=_integer_divisor)
def fmod(x: Array, y: Array) -> Array:
    return lax.rem(*jnp.broadcast_arrays(x, y))


@register_pointwise("round.decimals")
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


@register_pointwise("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar", when=_negative_power)
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


@register_pointwise(*(f"bitwise_left_shift.{o}" for o in _SHIFT_OVERLOADS))
@register_pointwise("__lshift__.Tensor", "__lshift__.Scalar")
def left_shift(x: Array, y: Array) -> Array:
    """Shifts by a negative amount or by the width and more give 0, in torch and in XLA."""
    if not is_integral(x):
        return x * jnp.exp2(y)
    return lax.shift_left(*_broadcast(x, y))


@register_pointwise(*(f"bitwise_right_shift.{o}" for o in _SHIFT_OVERLOADS))
@register_pointwise("__rshift__.Tensor", "__rshift__.Scalar")
def right_shift(x: Array, y: Array) -> Array:
    """Shifts by a negative amount or by the width and more leave only the sign."""
    if not is_integral(x):
        return x / jnp.exp2(y)
    if jnp.iinfo(x.dtype).min == 0:
        return lax.shift_right_logical(*_broadcast(x, y))
    return lax.shift_right_arithmetic(*_broadcast(x, y))


# Dynamo makes it of `addcmul_` and the like with a number in a tensor; torch knows it only then.
@register_pointwise("prims::fma.default")
def fma(x: Array, y: Array, z: Array) -> Array:
    if x.dtype == jnp.float32:  # float64 holds the product of two float32 exactly
        x, y, z = (a.astype(jnp.float64) for a in (x, y, z))
    return x * y + z


_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@register_pointwise("relu.default")
def relu(x: Array) -> Array:
    return jnp.maximum(x, 0)


@register_pointwise("silu.default")
def silu(x: Array) -> Array:
    return x / (1 + jnp.exp(-x))  # as eager; logistic(x) is 0 where x times it is no denormal yet


@register_pointwise("hardtanh.default", operands=slice(0, 1))
def hardtanh(x: Array, min_val: float = -1, max_val: float = 1) -> Array:
    return jnp.minimum(jnp.maximum(x, min_val), max_val)


@register_pointwise("hardsigmoid.default")
def hardsigmoid(x: Array) -> Array:
    return jnp.minimum(jnp.maximum(x + 3, 0), 6) / 6


@register_pointwise("hardswish.default")
def hardswish(x: Array) -> Array:
    return x * jnp.minimum(jnp.maximum(x + 3, 0), 6) / 6


@register_pointwise("leaky_relu.default", operands=slice(0, 1))
def leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, x * negative_slope)


@register_pointwise("elu.default", operands=slice(0, 1))
def elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    return jnp.where(x > 0, x * scale, expm1(x * input_scale) * (alpha * scale))


@register_pointwise("softplus.default", operands=slice(0, 1))
def softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(scaled)) / beta)


@register_pointwise("gelu.default")
def gelu(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        inner = _SQRT_2_OVER_PI * (x + _GELU_CUBIC * x * x * x)
        return 0.5 * x * (1 + jnp.tanh(inner))
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


@register_pointwise("gelu_backward.default")
def gelu_backward(grad: Array, x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        tanh = jnp.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x * x * x))
        inner_slope = _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * x * x)
        return grad * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner_slope)
    cdf = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    pdf = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (cdf + x * pdf)


@register_pointwise("sigmoid_backward.default")
def sigmoid_backward(grad: Array, output: Array) -> Array:
    return grad * jnp.conj(output * (1 - output))


@register_pointwise("tanh_backward.default")
def tanh_backward(grad: Array, output: Array) -> Array:
    return grad * jnp.conj(1 - output * output)


@register_pointwise("silu_backward.default")
def silu_backward(grad: Array, x: Array) -> Array:
    sigmoid = lax.logistic(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


@register_pointwise("threshold_backward.default", operands=slice(0, 2))
def threshold_backward(grad: Array, x: Array, threshold: float) -> Array:
    return jnp.where(x <= threshold, 0, grad).astype(grad.dtype)


@register_pointwise("hardtanh_backward.default", operands=slice(0, 2))
def hardtanh_backward(grad: Array, x: Array, min_val: float, max_val: float) -> Array:
    return jnp.where((x <= min_val) | (x >= max_val), 0, grad).astype(grad.dtype)


@register_pointwise("leaky_relu_backward.default", operands=slice(0, 2))
def leaky_relu_backward(
    grad: Array, x: Array, negative_slope: float, self_is_result: bool
) -> Array:
    return jnp.where(x > 0, grad, grad * negative_slope)


@register_pointwise("hardshrink_backward.default", operands=slice(0, 2))
def hardshrink_backward(grad: Array, x: Array, lambd: float) -> Array:
    return jnp.where((x >= -lambd) & (x <= lambd), 0, grad).astype(grad.dtype)


register_pointwise("softshrink_backward.default", operands=slice(0, 2))(hardshrink_backward)


@register_pointwise("_masked_scale.default", operands=slice(0, 2))
def masked_scale(x: Array, mask: Array, scale: float) -> Array:
    return x * mask * scale


@register_pointwise("rrelu_with_noise_backward.default", operands=slice(0, 3))
def rrelu_with_noise_backward(
    grad: Array,
    x: Array,
    noise: Array,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Array:
    if training and upper - lower > 1e-6:
        return grad * noise
    return leaky_relu_backward(grad, x, (lower + upper) / 2, self_is_result)


_ONE_SIXTH = float(np.float32(1.0) / np.float32(6.0))  # also in float64: eager has it as a float


@register_pointwise("hardsigmoid_backward.default", operands=slice(0, 2))
def hardsigmoid_backward(grad: Array, x: Array) -> Array:
    return jnp.where((x > -3) & (x < 3), grad * _ONE_SIXTH, 0)
