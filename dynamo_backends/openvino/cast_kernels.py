"""Casts that OpenVINO leaves out, or rounds otherwise than torch."""

import math
from typing import Any

from dynamo_backends.openvino.integer_kernels import NARROW, WHOLE_NUMBERS, narrowed
from dynamo_backends.openvino.nodes import Output, element_type, inputs_of, is_constant, number
from dynamo_backends.openvino.vendor import Type, ops


def converted(node: Any) -> Any:
    """Casts to narrower types, which OpenVINO removes before one to a wider type."""
    (x,) = inputs_of(node)
    kind = element_type(node.output(0))
    if element_type(x) == kind:
        return None
    if kind == Type.f32 and element_type(x) in _MANTISSA and _is_rounded(x):
        return x.get_node().input_value(0).get_node()
    if kind in _MANTISSA and element_type(x) in (Type.f32, *_MANTISSA) and not is_constant(x):
        wide = x if element_type(x) == Type.f32 else ops.convert(x, Type.f32).output(0)
        return ops.convert(_rounded(wide, kind), kind)
    if kind not in NARROW or element_type(x) not in (*WHOLE_NUMBERS, *NARROW):
        return None
    return narrowed(ops.convert(x, Type.i32), kind)


_MANTISSA = {Type.f16: 10, Type.bf16: 7}


_LEAST_POWER = {Type.f16: -14, Type.bf16: -126}


def _is_rounded(x: Output) -> bool:
    """Whether a value of 16 bits is a cast of one of 32 that `converted` has rounded.

    The processor's own cast to bfloat16 makes zeros of denormal numbers.
    """
    node = x.get_node()
    if node.get_type_name() != "Convert" or element_type(node.input_value(0)) != Type.f32:
        return False
    return bool(node.input_value(0).get_node().get_type_name() == "Select")


def _rounded(x: Output, kind: Type) -> Any:
    """Numbers of float32 with the bits of a narrower type, rounded to the nearest, ties to even.

    A number's power of two comes from rounding it to one bit (Dekker, 1971). A sum with a number
    that is so much larger that its last bit is the one to round to does the rest.
    """
    size = ops.absolute(x)
    is_large = ops.less(number(2.0**60, x), size)  # where what follows would overflow
    down = ops.select(is_large, number(2.0**-80, x), number(1.0, x))
    up = ops.select(is_large, number(2.0**80, x), number(1.0, x))
    given = ops.multiply(x, down)
    size = ops.absolute(given)
    product = ops.multiply(size, number(2.0**23 + 1, x))
    power = ops.subtract(product, ops.subtract(product, size))
    power = ops.select(ops.less(size, power), ops.multiply(power, number(0.5, x)), power)
    power = ops.maximum(number(2.0 ** _LEAST_POWER[kind], x), power)
    last = ops.multiply(power, number(1.5 * 2.0 ** (23 - _MANTISSA[kind]), x))
    result = ops.multiply(ops.subtract(ops.add(size, last), last), up)
    result = ops.select(ops.less(x, number(0, x)), ops.negative(result), result)
    if kind == Type.f16:
        infinity = ops.multiply(x, number(math.inf, x))
        result = ops.select(ops.less(number(65504, x), ops.absolute(result)), infinity, result)
    size = ops.absolute(x)
    zero, infinity = number(0, x), number(math.inf, x)
    is_plain = ops.logical_and(ops.less(zero, size), ops.less(size, infinity))
    return ops.select(is_plain, result, x)


def overflowing(node: Any) -> Any:
    """A result in float16, infinite beyond its range; the kernels compute in float32."""
    result = node.output(0)
    size = ops.convert(ops.absolute(result), Type.f32)
    is_large = ops.less_equal(ops.constant(65520, Type.f32), size)
    return ops.select(is_large, ops.multiply(result, number(math.inf, result)), node)
