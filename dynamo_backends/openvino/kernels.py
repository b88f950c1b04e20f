"""Operations that OpenVINO's CPU kernels compute otherwise than torch, and what they become.

The rows of `_REWRITES` are applied to models as the frontend makes them. Most kernels that are
wrong lose NaN, because the processor's own maximum gives its second operand for it; `maximum(0, x)`
keeps it, `maximum(x, 0)` does not. An activation that OpenVINO merges into a convolution or a
product before it stays as it is: rewriting it would cost a pass over the memory of each layer.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_backends.openvino.vendor import Model, Type, ops

Output = Any
Rewrite = Callable[[Any], Any]
"""Takes an operation and gives what is right, as a node; None: it is right as it is."""

_FLOATS = (Type.f16, Type.bf16, Type.f32, Type.f64)
_NARROW = {Type.u8: 8, Type.i8: 8, Type.i16: 16}
_WHOLE = (Type.i32, Type.i64)


def settle_kernels(model: Model) -> None:
    """Replaces operations whose kernels compute otherwise than torch, in place."""
    for node in model.get_ordered_ops():
        rewrite = _REWRITES.get(node.get_type_name())
        if rewrite is None:
            continue
        output = node.output(0)
        readers = list(output.get_target_inputs())
        made = rewrite(node)
        if made is not None:
            for reader in readers:
                reader.replace_source_output(made.output(0))


def _kind(source: Output) -> Type:
    kind: Type = source.get_element_type()
    return kind


def _inputs(node: Any) -> list[Any]:
    return [node.input_value(i) for i in range(node.get_input_size())]


def _number(value: float, like: Output) -> Any:
    if math.isinf(value) and _kind(like) == Type.bf16:  # whose constants OpenVINO checks
        return ops.convert(ops.constant(value, Type.f32), Type.bf16)
    return ops.constant(value, _kind(like))


def _is_constant(source: Output) -> bool:
    return bool(source.get_node().get_type_name() == "Constant")


def _keeping_nan(node: Any) -> Any:
    """The operation, with NaN where its input has it."""
    (x, *_) = _inputs(node)
    return ops.select(ops.not_equal(x, x), x, node) if _kind(x) in _FLOATS else None


# Through these OpenVINO merges an activation into what is before it.
_BEFORE = ("Add", "Multiply", "BatchNormInference", "Reshape", "Transpose")
_HEAVY = (
    "Convolution",
    "ConvolutionBackpropData",
    "GroupConvolution",
    "GroupConvolutionBackpropData",
    "MatMul",
)


def _is_merged(source: Output, depth: int = 4) -> bool:
    """Whether a value comes from a convolution or a product whose kernel takes activations, too."""
    node = source.get_node()
    if node.get_type_name() in _HEAVY:
        return True
    if not depth or node.get_type_name() not in _BEFORE:
        return False
    return any(_is_merged(x, depth - 1) for x in _inputs(node) if _kind(x) in _FLOATS)


def _activation(rewrite: Rewrite) -> Rewrite:
    return lambda node: None if _is_merged(node.input_value(0)) else rewrite(node)


def _relu(node: Any) -> Any:
    (x,) = _inputs(node)
    return ops.maximum(_number(0, x), x) if _kind(x) in _FLOATS else None


def _extreme(node: Any) -> Any:
    """A maximum or minimum: the kernel gives its second operand if one is NaN."""
    x, y = _inputs(node)
    if _kind(x) not in _FLOATS or _is_constant(x):
        return None
    make = ops.maximum if node.get_type_name() == "Maximum" else ops.minimum
    if _is_constant(y):
        return make(y, x)
    return ops.select(ops.not_equal(x, x), ops.add(x, y), make(x, y))


def _reduced_extreme(node: Any) -> Any:
    """The kernels ignore NaN, and begin at the largest finite number: rows of infinities end there.

    A second reduction counts the other elements, and is NaN where there is one.
    """
    x, axes = _inputs(node)
    if _kind(x) == Type.i32:
        return _reduced_integers(node)
    if _kind(x) not in _FLOATS:
        return _apart(node)
    none = -math.inf if node.get_type_name() == "ReduceMax" else math.inf
    one = ops.select(ops.not_equal(x, x), x, _number(1, x))
    each = ops.select(ops.equal(x, _number(none, x)), _number(0, x), one)
    count = ops.reduce_sum(each, axes, keep_dims=node.get_attributes()["keep_dims"])
    known = ops.add(node, ops.subtract(count, count))
    return ops.select(ops.equal(count, _number(0, x)), _number(none, x), known)


def _reduced_integers(node: Any) -> Any:
    """By the upper half of the bits first, then by the lower one: the kernels reduce in float32."""
    x, axes = _inputs(node)
    is_max = node.get_type_name() == "ReduceMax"
    reduce: Any = ops.reduce_max if is_max else ops.reduce_min
    low = ops.bitwise_and(x, ops.constant(0xFFFF, Type.i32))
    high = ops.subtract(x, low)
    first = _apart(reduce(high, axes, keep_dims=True))
    is_first = ops.convert(ops.equal(ops.subtract(high, first), _number(0, x)), Type.i32)
    worst = ops.constant(0 if is_max else 0xFFFF, Type.i32)
    second = ops.add(worst, ops.multiply(is_first, ops.subtract(low, worst)))
    result = ops.add(first, _apart(reduce(second, axes, keep_dims=True)))
    return result if node.get_attributes()["keep_dims"] else ops.squeeze(result, axes)


def _apart(node: Any) -> Any:
    """Keeps a reduction of integers from what follows: merged, it computes the first rows alone."""
    kind = _kind(node.output(0))
    if kind not in (*_WHOLE, *_NARROW) or _is_shape(node.output(0)):
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
        waiting += [x.get_node() for x in _inputs(node)]
    return True


def _compared(node: Any) -> Any:
    """Comparisons: of numbers the kernels of `Less` are right, of integers none that is large."""
    x, y = _inputs(node)
    name = node.get_type_name()
    if _kind(x) in _WHOLE:
        return _compared_integers(name, x, y)
    if _kind(x) not in _FLOATS or name not in ("Greater", "GreaterEqual"):
        return None
    return (ops.less if name == "Greater" else ops.less_equal)(y, x)


def _compared_integers(name: str, x: Output, y: Output) -> Any:
    """By differences, which are exact, and 0 only where two integers are equal."""
    if name in ("Greater", "GreaterEqual"):
        x, y = y, x
    zero = _number(0, x)
    if name in ("Equal", "NotEqual"):
        difference = ops.subtract(x, y)
    else:  # x < y: the larger one is not x; x <= y: it is y
        is_strict = name in ("Less", "Greater")
        difference = ops.subtract(ops.maximum(x, y), x if is_strict else y)
    is_equal = name in ("Equal", "LessEqual", "GreaterEqual")
    return (ops.equal if is_equal else ops.not_equal)(difference, zero)


def _wrapped(node: Any) -> Any:
    """Arithmetic on 8 and 16 bits, in 32: kernels do not wrap around, or not between two calls."""
    inputs = _inputs(node)
    kind = _kind(inputs[0])
    if kind not in _NARROW:
        return None
    make: Any = getattr(ops, _NAMES.get(node.get_type_name(), node.get_type_name().lower()))
    return _narrowed(make(*(ops.convert(x, Type.i32) for x in inputs)), kind)


_NAMES = {"Abs": "absolute"}


def _narrowed(wide: Any, kind: Type) -> Any:
    """The lower bits of integers of 32, as a narrower type."""
    bits = _NARROW[kind]
    low = ops.bitwise_and(wide, ops.constant((1 << bits) - 1, Type.i32))
    if kind != Type.u8:
        sign = ops.constant(1 << (bits - 1), Type.i32)
        low = ops.subtract(ops.bitwise_xor(low, sign), sign)
    return ops.convert(low, kind)


def _converted(node: Any) -> Any:
    """Casts to narrower types, which OpenVINO removes before one to a wider type."""
    (x,) = _inputs(node)
    kind = _kind(node.output(0))
    if _kind(x) == kind:
        return None
    if kind == Type.f32 and _kind(x) in _MANTISSA and _is_rounded(x):
        return x.get_node().input_value(0).get_node()
    if kind in _MANTISSA and _kind(x) in (Type.f32, *_MANTISSA) and not _is_constant(x):
        wide = x if _kind(x) == Type.f32 else ops.convert(x, Type.f32).output(0)
        return ops.convert(_rounded(wide, kind), kind)
    if kind not in _NARROW or _kind(x) not in (*_WHOLE, *_NARROW):
        return None
    return _narrowed(ops.convert(x, Type.i32), kind)


_MANTISSA = {Type.f16: 10, Type.bf16: 7}
_LEAST_POWER = {Type.f16: -14, Type.bf16: -126}


def _is_rounded(x: Output) -> bool:
    """Whether a value of 16 bits is a cast of one of 32 that `_converted` has rounded.

    The processor's own cast to bfloat16 makes zeros of denormal numbers.
    """
    node = x.get_node()
    if node.get_type_name() != "Convert" or _kind(node.input_value(0)) != Type.f32:
        return False
    return bool(node.input_value(0).get_node().get_type_name() == "Select")


def _rounded(x: Output, kind: Type) -> Any:
    """Numbers of float32 with the bits of a narrower type, rounded to the nearest, ties to even.

    A number's power of two comes from rounding it to one bit (Dekker, 1971). A sum with a number
    that is so much larger that its last bit is the one to round to does the rest.
    """
    size = ops.absolute(x)
    is_large = ops.less(_number(2.0**60, x), size)  # where what follows would overflow
    down = ops.select(is_large, _number(2.0**-80, x), _number(1.0, x))
    up = ops.select(is_large, _number(2.0**80, x), _number(1.0, x))
    given = ops.multiply(x, down)
    size = ops.absolute(given)
    product = ops.multiply(size, _number(2.0**23 + 1, x))
    power = ops.subtract(product, ops.subtract(product, size))
    power = ops.select(ops.less(size, power), ops.multiply(power, _number(0.5, x)), power)
    power = ops.maximum(_number(2.0 ** _LEAST_POWER[kind], x), power)
    last = ops.multiply(power, _number(1.5 * 2.0 ** (23 - _MANTISSA[kind]), x))
    result = ops.multiply(ops.subtract(ops.add(size, last), last), up)
    result = ops.select(ops.less(x, _number(0, x)), ops.negative(result), result)
    if kind == Type.f16:
        infinity = ops.multiply(x, _number(math.inf, x))
        result = ops.select(ops.less(_number(65504, x), ops.absolute(result)), infinity, result)
    size = ops.absolute(x)
    zero, infinity = _number(0, x), _number(math.inf, x)
    is_plain = ops.logical_and(ops.less(zero, size), ops.less(size, infinity))
    return ops.select(is_plain, result, x)


def _sign(node: Any) -> Any:
    (x,) = _inputs(node)
    return ops.select(ops.not_equal(x, x), _number(0, x), node) if _kind(x) in _FLOATS else None


def _erf(node: Any) -> Any:
    """Next to 0 by the series; the kernel is off by 1e-7 absolutely."""
    (x,) = _inputs(node)
    if _kind(x) != Type.f32:
        return None
    square = ops.multiply(x, x)
    series: Any = _number(0.0, x)
    for term in (4, 3, 2, 1, 0):
        factor = (-1) ** term * 2 / math.sqrt(math.pi) / math.factorial(term) / (2 * term + 1)
        series = ops.add(ops.multiply(series, square), _number(factor, x))
    near = ops.less(square, _number(0.0625, x))
    return ops.select(near, ops.multiply(x, series), node)


def _elu(node: Any) -> Any:
    """With exp(x) - 1 next to 0 as a quotient of hyperbolic tangents; the kernel subtracts."""
    (x,) = _inputs(node)
    if _kind(x) not in _FLOATS:
        return None
    low = ops.minimum(_number(0, x), x)
    t = ops.tanh(ops.multiply(low, _number(0.5, x)))
    near = ops.divide(ops.multiply(_number(2, x), t), ops.subtract(_number(1, x), t))
    far = ops.subtract(ops.exp(low), _number(1, x))
    below = ops.select(ops.less(_number(-0.5, x), low), near, far)
    below = ops.multiply(_number(node.get_attributes()["alpha"], x), below)
    return ops.select(ops.less_equal(x, _number(0, x)), below, x)


def _mish(node: Any) -> Any:
    """x * tanh(softplus(x)) without a difference of nearly equal numbers."""
    (x,) = _inputs(node)
    if _kind(x) not in _FLOATS:
        return None
    e = ops.exp(ops.minimum(_number(20, x), x))
    n = ops.multiply(e, ops.add(e, _number(2, x)))
    bounded = ops.divide(n, ops.add(n, _number(2, x)))
    return ops.select(ops.not_equal(x, x), x, ops.multiply(x, bounded))


def _selected(node: Any) -> Any:
    """A choice between integers, by arithmetic, which is exact; the kernel chooses in float32."""
    condition, x, y = _inputs(node)
    if _kind(x) not in _WHOLE:
        return None
    return ops.add(y, ops.multiply(ops.subtract(x, y), ops.convert(condition, _kind(x))))


def _swish(node: Any) -> Any:
    """As a quotient; the kernel multiplies by what may be too small a number."""
    x, *scales = _inputs(node)
    if _kind(x) not in _FLOATS or scales:
        return None
    root = ops.exp(ops.multiply(x, _number(-0.5, x)))  # (see `_exp`)
    return ops.divide(x, ops.add(_number(1, x), ops.multiply(root, root)))


def _exp(node: Any) -> Any:
    """Of large numbers as a square: the kernel has no results beyond 2.4e38."""
    (x,) = _inputs(node)
    if _kind(x) not in _FLOATS:
        return None
    is_large = ops.less(_number(80, x), x)
    one = _number(1, x)
    root = ops.exp(ops.multiply(x, ops.select(is_large, _number(0.5, x), one)))
    result = ops.multiply(root, ops.select(is_large, root, one))
    return ops.select(ops.not_equal(x, x), x, result)


def _softmax(node: Any) -> Any:
    """By its formula: the kernel has numbers beside NaN, and zeros for the least normal numbers."""
    (x,) = _inputs(node)
    if _kind(x) not in _FLOATS or _is_merged(x):
        return None
    axis = ops.constant([node.get_attributes()["axis"]], Type.i64)
    below = ops.subtract(x, ops.reduce_max(x, axis, keep_dims=True))
    each = ops.select(ops.not_equal(below, below), below, ops.exp(below))
    return ops.divide(each, ops.reduce_sum(each, axis, keep_dims=True))


def _reshape(node: Any) -> Any:
    """To no dimensions in two steps: OpenVINO crashes where it merges one into a product."""
    shape = node.output(0).get_partial_shape()
    if shape.rank.is_dynamic or shape.rank.get_length():
        return None
    line = ops.reshape(node.input_value(0), ops.constant([1], Type.i64), special_zero=False)
    return ops.squeeze(line, ops.constant([0], Type.i64))


_SUMS, _PRODUCTS = ("Add", "Subtract"), ("Multiply", "Divide")
_MERGED_BY = {**dict.fromkeys(_SUMS, _SUMS + _PRODUCTS), **dict.fromkeys(_PRODUCTS, _PRODUCTS)}
"""Operations on constants, and which ones after them OpenVINO merges with them."""


def _linear(node: Any) -> Any:
    """Hides an operation on a constant from OpenVINO, which merges two of them into one.

    So (x + C) - C became x, and (x * 1e30) * 1e30 of 0 NaN. A maximum with -inf changes nothing.
    """
    wrapped = _wrapped(node)
    if wrapped is not None:
        return wrapped
    if _kind(node.output(0)) == Type.f16 and _is_computed_with(node):
        return _overflowing(node)
    if _kind(node.output(0)) not in _FLOATS or not _has_constant(node):
        return None
    merging = _MERGED_BY[node.get_type_name()]
    readers = [r.get_node() for r in node.output(0).get_target_inputs()]
    names = {r.get_type_name() for r in readers if _has_constant(r)}
    is_bias = any(_is_merged(x, 1) for x in _inputs(node))  # what follows scales the weights
    if not names & set(_SUMS if is_bias else merging) & set(merging):
        return None
    return ops.maximum(_number(-math.inf, node.output(0)), node)


def _is_computed_with(node: Any) -> bool:
    readers = node.output(0).get_target_inputs()
    return any(r.get_node().get_type_name() in _SUMS + _PRODUCTS for r in readers)


def _overflowing(node: Any) -> Any:
    """A result in float16, infinite beyond its range; the kernels compute in float32."""
    result = node.output(0)
    size = ops.convert(ops.absolute(result), Type.f32)
    is_large = ops.less_equal(ops.constant(65520, Type.f32), size)
    return ops.select(is_large, ops.multiply(result, _number(math.inf, result)), node)


def _has_constant(node: Any) -> bool:
    return any(_is_fixed(x) for x in _inputs(node))


def _is_fixed(source: Output, depth: int = 4) -> bool:
    """Whether a value is a constant, or an input, which a weight may be, in another form."""
    node = source.get_node()
    if node.get_type_name() in ("Constant", "Parameter"):
        return True
    forms = ("Convert", "ConvertLike", "Reshape", "Unsqueeze", "Broadcast", "Transpose")
    return (
        bool(depth) and node.get_type_name() in forms and _is_fixed(node.input_value(0), depth - 1)
    )


_REWRITES: Mapping[str, Rewrite] = {
    "Abs": _wrapped,
    "Add": _linear,
    "Clamp": _activation(_keeping_nan),
    "Convert": _converted,
    "Divide": _linear,
    "Elu": _activation(_elu),
    "Equal": _compared,
    "Erf": _erf,
    "Exp": _exp,
    "Greater": _compared,
    "GreaterEqual": _compared,
    "HSigmoid": _activation(_keeping_nan),
    "HardSigmoid": _activation(_keeping_nan),
    "Less": _compared,
    "LessEqual": _compared,
    "Maximum": _extreme,
    "Minimum": _extreme,
    "Mish": _mish,
    "Multiply": _linear,
    "Negative": _wrapped,
    "NotEqual": _compared,
    "ReduceMax": _reduced_extreme,
    "ReduceMin": _reduced_extreme,
    "ReduceProd": _apart,
    "ReduceSum": _apart,
    "Reshape": _reshape,
    "Relu": _activation(_relu),
    "Select": _selected,
    "Sign": _sign,
    "Softmax": _softmax,
    "Subtract": _linear,
    "Swish": _activation(_swish),
}
"""By the type of the operation."""
