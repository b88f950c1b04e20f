"""Operations on integers that OpenVINO's CPU kernels compute otherwise than torch.

Most of these kernels compute in float32, or do not wrap around.
"""

from typing import Any

from dynamo_backends.openvino.nodes import Output, element_type, inputs_of, number
from dynamo_backends.openvino.vendor import Type, ops

NARROW = {Type.u8: 8, Type.i8: 8, Type.i16: 16}


WHOLE_NUMBERS = (Type.i32, Type.i64)


def reduced_integers(node: Any) -> Any:
    """By the upper half of the bits first, then by the lower one: the kernels reduce in float32."""
    x, axes = inputs_of(node)
    is_max = node.get_type_name() == "ReduceMax"
    reduce: Any = ops.reduce_max if is_max else ops.reduce_min
    low = ops.bitwise_and(x, ops.constant(0xFFFF, Type.i32))
    high = ops.subtract(x, low)
    first = separate(reduce(high, axes, keep_dims=True))
    is_first = ops.convert(ops.equal(ops.subtract(high, first), number(0, x)), Type.i32)
    worst = ops.constant(0 if is_max else 0xFFFF, Type.i32)
    second = ops.add(worst, ops.multiply(is_first, ops.subtract(low, worst)))
    result = ops.add(first, separate(reduce(second, axes, keep_dims=True)))
    return result if node.get_attributes()["keep_dims"] else ops.squeeze(result, axes)


def separate(node: Any) -> Any:
    """Keeps a reduction of integers from what follows: merged, it computes the first rows alone."""
    kind = element_type(node.output(0))
    if kind not in (*WHOLE_NUMBERS, *NARROW) or _is_shape(node.output(0)):
        return None
    every = 255 if kind == Type.u8 else -1
    return ops.bitwise_and(node, ops.constant(every, kind))


def _is_shape(source: Output) -> bool:
    """Whether a value follows from sizes and constants; OpenVINO computes these as it compiles."""
    waiting, seen = [source.get_node()], set()
    while waiting:
        node = waiting.pop()
        name = node.get_friendly_name()
        if name in seen or node.get_type_name() in ("Constant", "ShapeOf"):
            continue
        seen.add(name)
        if not node.get_input_size():
            return False
        waiting += [x.get_node() for x in inputs_of(node)]
    return True


def compared_integers(name: str, x: Output, y: Output) -> Any:
    """By differences, which are exact, and 0 only where two integers are equal."""
    if name in ("Greater", "GreaterEqual"):
        x, y = y, x
    zero = number(0, x)
    if name in ("Equal", "NotEqual"):
        difference = ops.subtract(x, y)
    else:  # x < y: the larger one is not x; x <= y: it is y
        is_strict = name in ("Less", "Greater")
        difference = ops.subtract(ops.maximum(x, y), x if is_strict else y)
    is_equal = name in ("Equal", "LessEqual", "GreaterEqual")
    return (ops.equal if is_equal else ops.not_equal)(difference, zero)


def wrapped(node: Any) -> Any:
    """Arithmetic on 8 and 16 bits, in 32: kernels do not wrap around, or not between two calls."""
    inputs = inputs_of(node)
    kind = element_type(inputs[0])
    if kind not in NARROW:
        return None
    make: Any = getattr(ops, _NAMES.get(node.get_type_name(), node.get_type_name().lower()))
    return narrowed(make(*(ops.convert(x, Type.i32) for x in inputs)), kind)


_NAMES = {"Abs": "absolute"}


def narrowed(wide: Any, kind: Type) -> Any:
    """The lower bits of integers of 32, as a narrower type."""
    bits = NARROW[kind]
    low = ops.bitwise_and(wide, ops.constant((1 << bits) - 1, Type.i32))
    if kind != Type.u8:
        sign = ops.constant(1 << (bits - 1), Type.i32)
        low = ops.subtract(ops.bitwise_xor(low, sign), sign)
    return ops.convert(low, kind)


def selected(node: Any) -> Any:
    """A choice between integers, by arithmetic, which is exact; the kernel chooses in float32."""
    condition, x, y = inputs_of(node)
    if element_type(x) not in WHOLE_NUMBERS:
        return None
    return ops.add(y, ops.multiply(ops.subtract(x, y), ops.convert(condition, element_type(x))))
