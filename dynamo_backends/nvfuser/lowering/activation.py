"""Activation functions; their gradients, and all others, torch decomposes."""

import math

from dynamo_backends.nvfuser.lowering.registry import pointwise
from dynamo_backends.nvfuser.values import Number, Value

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@pointwise("relu.default")
def relu(x: Value) -> Value:
    return (x < 0).where(0, x)


@pointwise("hardtanh.default", operands=1)
def hardtanh(x: Value, min_val: Number = -1, max_val: Number = 1) -> Value:
    x = (x < min_val).where(min_val, x)
    return (x > max_val).where(max_val, x)


@pointwise("leaky_relu.default", operands=1)
def leaky_relu(x: Value, negative_slope: Number = 0.01) -> Value:
    return (x > 0).where(x, x * negative_slope)


@pointwise("elu.default", operands=1)
def elu(x: Value, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Value:
    return (x > 0).where(x * scale, (x * input_scale).unary("expm1") * (alpha * scale))


@pointwise("gelu.default")
def gelu(x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inner = (x + x * x * x * _GELU_CUBIC) * _SQRT_2_OVER_PI
        return x * 0.5 * (inner.unary("tanh") + 1)
    return x * 0.5 * ((x * math.sqrt(0.5)).unary("erf") + 1)
