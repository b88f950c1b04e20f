"""Integer operations and casts that OpenVINO's CPU kernels compute otherwise than torch.

Most of these kernels compute in float32, or do not wrap around.
"""

import math
from typing import Any

from dynamo_backends.openvino.vendor import Type, ops

Output = Any

FLOATS = (Type.f16, Type.bf16, Type.f32, Type.f64)


def element_type(source: Output) -> Type:
    """Returns the element type of an operation's output."""
    kind: Type = source.get_element_type()
    return kind


def source_outputs(node: Any) -> list[Any]:
    """Returns the outputs of other operations that feed a node's inputs."""
    return [node.input_value(i) for i in range(node.get_input_size())]


def make_constant(value: float, like: Output) -> Any:
    """Makes a scalar constant with the element type of an output."""
    if math.isinf(value) and element_type(like) == Type.bf16:  # whose constants OpenVINO checks
        return ops.convert(ops.constant(value, Type.f32), Type.bf16)
    return ops.constant(value, element_type(like))


def is_constant(source: Output) -> bool:
    """Returns whether an output belongs to a `Constant` operation."""
    return bool(source.get_node().get_type_name() == "Constant")


NARROW_INTEGER_BITS = {Type.u8: 8, Type.i8: 8, Type.i16: 16}


INT32_AND_INT64 = (Type.i32, Type.i64)


def rewrite_integer_reduction(node: Any) -> Any:
    """Rewrites an int32 max or min as two exact ones, of upper and lower 16 bits."""
    x, axes = source_outputs(node)
    is_max = node.get_type_name() == "ReduceMax"
    reduce: Any = ops.reduce_max if is_max else ops.reduce_min
    low = ops.bitwise_and(x, ops.constant(0xFFFF, Type.i32))
    high = ops.subtract(x, low)
    first = block_reduction_fusion(reduce(high, axes, keep_dims=True))
    is_first = ops.convert(ops.equal(ops.subtract(high, first), make_constant(0, x)), Type.i32)
    worst = ops.constant(0 if is_max else 0xFFFF, Type.i32)
    second = ops.add(worst, ops.multiply(is_first, ops.subtract(low, worst)))
    result = ops.add(first, block_reduction_fusion(reduce(second, axes, keep_dims=True)))
    return result if node.get_attributes()["keep_dims"] else ops.squeeze(result, axes)


def block_reduction_fusion(node: Any) -> Any:
    """Puts a bitwise no-op after an integer reduction: fused ones are wrong."""
    kind = element_type(node.output(0))
    if kind not in (*INT32_AND_INT64, *NARROW_INTEGER_BITS) or _is_shape(node.output(0)):
        return None
    every = 255 if kind == Type.u8 else -1
    return ops.bitwise_and(node, ops.constant(every, kind))


def _is_shape(source: Output) -> bool:
    """Returns whether a value follows from sizes and constants alone."""
    waiting, seen = [source.get_node()], set()
    while waiting:
        node = waiting.pop()
        name = node.get_friendly_name()
        if name in seen or node.get_type_name() in ("Constant", "ShapeOf"):
            continue
        seen.add(name)
        if not node.get_input_size():
            return False
        waiting += [x.get_node() for x in source_outputs(node)]
    return True


def rewrite_integer_comparison(name: str, x: Output, y: Output) -> Any:
    """Rewrites a comparison of integers to exact tests of a difference with 0."""
    if name in ("Greater", "GreaterEqual"):
        x, y = y, x
    zero = make_constant(0, x)
    if name in ("Equal", "NotEqual"):
        difference = ops.subtract(x, y)
    else:  # x < y: the larger one is not x; x <= y: it is y
        is_strict = name in ("Less", "Greater")
        difference = ops.subtract(ops.maximum(x, y), x if is_strict else y)
    is_equal = name in ("Equal", "LessEqual", "GreaterEqual")
    return (ops.equal if is_equal else ops.not_equal)(difference, zero)


def rewrite_narrow_arithmetic(node: Any) -> Any:
    """Computes 8- and 16-bit arithmetic in int32, so that it wraps around."""
    inputs = source_outputs(node)
    kind = element_type(inputs[0])
    if kind not in NARROW_INTEGER_BITS:
        return None
    make: Any = getattr(ops, _NAMES.get(node.get_type_name(), node.get_type_name().lower()))
    return truncate_to_narrow(make(*(ops.convert(x, Type.i32) for x in inputs)), kind)


_NAMES = {"Abs": "absolute"}


def truncate_to_narrow(wide: Any, kind: Type) -> Any:
    """Truncates int32 to an 8- or 16-bit type, with wraparound."""
    bits = NARROW_INTEGER_BITS[kind]
    low = ops.bitwise_and(wide, ops.constant((1 << bits) - 1, Type.i32))
    if kind != Type.u8:
        sign = ops.constant(1 << (bits - 1), Type.i32)
        low = ops.subtract(ops.bitwise_xor(low, sign), sign)
    return ops.convert(low, kind)


def rewrite_integer_select(node: Any) -> Any:
    """Rewrites a select of integers to exact arithmetic; the kernel uses float32."""
    condition, x, y = source_outputs(node)
    if element_type(x) not in INT32_AND_INT64:
        return None
    return ops.add(y, ops.multiply(ops.subtract(x, y), ops.convert(condition, element_type(x))))


def rewrite_convert(node: Any) -> Any:
    """Rewrites casts to narrower types, which OpenVINO drops before a widening cast."""
    (x,) = source_outputs(node)
    kind = element_type(node.output(0))
    if element_type(x) == kind:
        return None
    if kind == Type.f32 and element_type(x) in _MANTISSA and _is_rounded(x):
        return x.get_node().input_value(0).get_node()
    if kind in _MANTISSA and element_type(x) in (Type.f32, *_MANTISSA) and not is_constant(x):
        wide = x if element_type(x) == Type.f32 else ops.convert(x, Type.f32).output(0)
        return ops.convert(_rounded(wide, kind), kind)
    if kind not in NARROW_INTEGER_BITS or element_type(x) not in (
        *INT32_AND_INT64,
        *NARROW_INTEGER_BITS,
    ):
        return None
    return truncate_to_narrow(ops.convert(x, Type.i32), kind)


_MANTISSA = {Type.f16: 10, Type.bf16: 7}


_LEAST_POWER = {Type.f16: -14, Type.bf16: -126}


def _is_rounded(x: Output) -> bool:
    """Returns whether a 16-bit value is a cast that `rewrite_convert` has rounded.

    The processor's own cast to bfloat16 makes zeros of denormal numbers.
    """
    node = x.get_node()
    if node.get_type_name() != "Convert" or element_type(node.input_value(0)) != Type.f32:
        return False
    return bool(node.input_value(0).get_node().get_type_name() == "Select")


def _rounded(x: Output, kind: Type) -> Any:
    """Rounds float32 to a narrower type's precision, ties to even.

    A number's power of two comes from rounding it to one bit (Dekker, 1971). A sum with a number
    that is so much larger that its last bit is the one to round to does the rest.
    """
    size = ops.absolute(x)
    is_large = ops.less(make_constant(2.0**60, x), size)  # where what follows would overflow
    down = ops.select(is_large, make_constant(2.0**-80, x), make_constant(1.0, x))
    up = ops.select(is_large, make_constant(2.0**80, x), make_constant(1.0, x))
    given = ops.multiply(x, down)
    size = ops.absolute(given)
    product = ops.multiply(size, make_constant(2.0**23 + 1, x))
    power = ops.subtract(product, ops.subtract(product, size))
    power = ops.select(ops.less(size, power), ops.multiply(power, make_constant(0.5, x)), power)
    power = ops.maximum(make_constant(2.0 ** _LEAST_POWER[kind], x), power)
    last = ops.multiply(power, make_constant(1.5 * 2.0 ** (23 - _MANTISSA[kind]), x))
    result = ops.multiply(ops.subtract(ops.add(size, last), last), up)
    result = ops.select(ops.less(x, make_constant(0, x)), ops.negative(result), result)
    if kind == Type.f16:
        infinity = ops.multiply(x, make_constant(math.inf, x))
        result = ops.select(
            ops.less(make_constant(65504, x), ops.absolute(result)), infinity, result
        )
    size = ops.absolute(x)
    zero, infinity = make_constant(0, x), make_constant(math.inf, x)
    is_plain = ops.logical_and(ops.less(zero, size), ops.less(size, infinity))
    return ops.select(is_plain, result, x)


def rewrite_float16_overflow(node: Any) -> Any:
    """Makes float16 results infinite beyond its range; kernels keep float32."""
    result = node.output(0)
    size = ops.convert(ops.absolute(result), Type.f32)
    is_large = ops.less_equal(ops.constant(65520, Type.f32), size)
    return ops.select(is_large, ops.multiply(result, make_constant(math.inf, result)), node)
