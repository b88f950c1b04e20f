"""Activation functions and their gradients."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamo_backends.xla.lowering.pointwise import expm1
from dynamo_backends.xla.lowering.registry import pointwise

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@pointwise("relu.default")
def relu(x: Array) -> Array:
    return jnp.maximum(x, 0)


@pointwise("silu.default")
def silu(x: Array) -> Array:
    return x / (1 + jnp.exp(-x))  # as eager; logistic(x) is 0 where x times it is no denormal yet


@pointwise("hardtanh.default", operands=slice(0, 1))
def hardtanh(x: Array, min_val: float = -1, max_val: float = 1) -> Array:
    return jnp.minimum(jnp.maximum(x, min_val), max_val)


@pointwise("hardsigmoid.default")
def hardsigmoid(x: Array) -> Array:
    return jnp.minimum(jnp.maximum(x + 3, 0), 6) / 6


@pointwise("hardswish.default")
def hardswish(x: Array) -> Array:
    return x * jnp.minimum(jnp.maximum(x + 3, 0), 6) / 6


@pointwise("leaky_relu.default", operands=slice(0, 1))
def leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, x * negative_slope)


@pointwise("elu.default", operands=slice(0, 1))
def elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    return jnp.where(x > 0, x * scale, expm1(x * input_scale) * (alpha * scale))


@pointwise("softplus.default", operands=slice(0, 1))
def softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(scaled)) / beta)


@pointwise("gelu.default")
def gelu(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        inner = _SQRT_2_OVER_PI * (x + _GELU_CUBIC * x * x * x)
        return 0.5 * x * (1 + jnp.tanh(inner))
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


@pointwise("gelu_backward.default")
def gelu_backward(grad: Array, x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        tanh = jnp.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x * x * x))
        inner_slope = _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * x * x)
        return grad * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner_slope)
    cdf = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    pdf = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (cdf + x * pdf)


@pointwise("sigmoid_backward.default")
def sigmoid_backward(grad: Array, output: Array) -> Array:
    return grad * jnp.conj(output * (1 - output))


@pointwise("tanh_backward.default")
def tanh_backward(grad: Array, output: Array) -> Array:
    return grad * jnp.conj(1 - output * output)


@pointwise("silu_backward.default")
def silu_backward(grad: Array, x: Array) -> Array:
    sigmoid = lax.logistic(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


@pointwise("threshold_backward.default", operands=slice(0, 2))
def threshold_backward(grad: Array, x: Array, threshold: float) -> Array:
    return jnp.where(x <= threshold, 0, grad).astype(grad.dtype)


@pointwise("hardtanh_backward.default", operands=slice(0, 2))
def hardtanh_backward(grad: Array, x: Array, min_val: float, max_val: float) -> Array:
    return jnp.where((x <= min_val) | (x >= max_val), 0, grad).astype(grad.dtype)


@pointwise("leaky_relu_backward.default", operands=slice(0, 2))
def leaky_relu_backward(
    grad: Array, x: Array, negative_slope: float, self_is_result: bool
) -> Array:
    return jnp.where(x > 0, grad, grad * negative_slope)


@pointwise("hardshrink_backward.default", operands=slice(0, 2))
def hardshrink_backward(grad: Array, x: Array, lambd: float) -> Array:
    return jnp.where((x >= -lambd) & (x <= lambd), 0, grad).astype(grad.dtype)


pointwise("softshrink_backward.default", operands=slice(0, 2))(hardshrink_backward)


@pointwise("_masked_scale.default", operands=slice(0, 2))
def masked_scale(x: Array, mask: Array, scale: float) -> Array:
    return x * mask * scale


@pointwise("rrelu_with_noise_backward.default", operands=slice(0, 3))
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


@pointwise("hardsigmoid_backward.default", operands=slice(0, 2))
def hardsigmoid_backward(grad: Array, x: Array) -> Array:
    return jnp.where((x > -3) & (x < 3), grad * _ONE_SIXTH, 0)
