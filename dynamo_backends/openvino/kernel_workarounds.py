"""Operations that OpenVINO's CPU kernels compute otherwise than torch, and what they become.

The rows of `_REWRITES` are applied to models as the frontend makes them. Most kernels that are
wrong lose NaN, because the processor's own maximum gives its second operand for it; `maximum(0, x)`
keeps it, `maximum(x, 0)` does not. An activation that OpenVINO merges into a convolution or a
product before it stays as it is: rewriting it would cost a pass over the memory of each layer.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_backends.openvino.integer_workarounds import (
    FLOATS,
    INT32_AND_INT64,
    Output,
    block_reduction_fusion,
    element_type,
    is_constant,
    make_constant,
    rewrite_convert,
    rewrite_float16_overflow,
    rewrite_integer_comparison,
    rewrite_integer_reduction,
    rewrite_integer_select,
    rewrite_narrow_arithmetic,
    source_outputs,
)
from dynamo_backends.openvino.vendor import Model, Type, ops

Rewrite = Callable[[Any], Any]
"""Takes an operation and gives what is right, as a node; None: it is right as it is."""


def replace_faulty_operations(model: Model) -> None:
    """Replaces operations whose CPU kernels differ from torch's, in place."""
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


def _keeping_nan(node: Any) -> Any:
    """Restores NaN in the result where the input has it."""
    (x, *_) = source_outputs(node)
    return ops.select(ops.not_equal(x, x), x, node) if element_type(x) in FLOATS else None


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
    """Returns whether OpenVINO fuses the value's consumer into a convolution or matmul."""
    node = source.get_node()
    if node.get_type_name() in _HEAVY:
        return True
    if not depth or node.get_type_name() not in _BEFORE:
        return False
    return any(_is_merged(x, depth - 1) for x in source_outputs(node) if element_type(x) in FLOATS)


def _activation(rewrite: Rewrite) -> Rewrite:
    return lambda node: None if _is_merged(node.input_value(0)) else rewrite(node)


def _relu(node: Any) -> Any:
    (x,) = source_outputs(node)
    return ops.maximum(make_constant(0, x), x) if element_type(x) in FLOATS else None


def _extreme(node: Any) -> Any:
    """Rewrites maximum and minimum to propagate NaN from either operand."""
    x, y = source_outputs(node)
    if element_type(x) not in FLOATS or is_constant(x):
        return None
    make = ops.maximum if node.get_type_name() == "Maximum" else ops.minimum
    if is_constant(y):
        return make(y, x)
    return ops.select(ops.not_equal(x, x), ops.add(x, y), make(x, y))


def _reduced_extreme(node: Any) -> Any:
    """Rewrites max and min reductions to propagate NaN and infinities.

    A second reduction counts the other elements, and is NaN where there is one.
    """
    x, axes = source_outputs(node)
    if element_type(x) == Type.i32:
        return rewrite_integer_reduction(node)
    if element_type(x) not in FLOATS:
        return block_reduction_fusion(node)
    none = -math.inf if node.get_type_name() == "ReduceMax" else math.inf
    one = ops.select(ops.not_equal(x, x), x, make_constant(1, x))
    each = ops.select(ops.equal(x, make_constant(none, x)), make_constant(0, x), one)
    count = ops.reduce_sum(each, axes, keep_dims=node.get_attributes()["keep_dims"])
    known = ops.add(node, ops.subtract(count, count))
    return ops.select(ops.equal(count, make_constant(0, x)), make_constant(none, x), known)


def _compared(node: Any) -> Any:
    """Rewrites greater to less with operands swapped, and integer comparisons."""
    x, y = source_outputs(node)
    name = node.get_type_name()
    if element_type(x) in INT32_AND_INT64:
        return rewrite_integer_comparison(name, x, y)
    if element_type(x) not in FLOATS or name not in ("Greater", "GreaterEqual"):
        return None
    return (ops.less if name == "Greater" else ops.less_equal)(y, x)


def _sign(node: Any) -> Any:
    (x,) = source_outputs(node)
    return (
        ops.select(ops.not_equal(x, x), make_constant(0, x), node)
        if element_type(x) in FLOATS
        else None
    )


def _erf(node: Any) -> Any:
    """Computes erf near 0 by its series; the kernel's absolute error is 1e-7 there."""
    (x,) = source_outputs(node)
    if element_type(x) != Type.f32:
        return None
    square = ops.multiply(x, x)
    series: Any = make_constant(0.0, x)
    for term in (4, 3, 2, 1, 0):
        factor = (-1) ** term * 2 / math.sqrt(math.pi) / math.factorial(term) / (2 * term + 1)
        series = ops.add(ops.multiply(series, square), make_constant(factor, x))
    near = ops.less(square, make_constant(0.0625, x))
    return ops.select(near, ops.multiply(x, series), node)


def _elu(node: Any) -> Any:
    """Computes exp(x) - 1 near 0 by tanh; the kernel loses digits in the subtraction."""
    (x,) = source_outputs(node)
    if element_type(x) not in FLOATS:
        return None
    low = ops.minimum(make_constant(0, x), x)
    t = ops.tanh(ops.multiply(low, make_constant(0.5, x)))
    near = ops.divide(ops.multiply(make_constant(2, x), t), ops.subtract(make_constant(1, x), t))
    far = ops.subtract(ops.exp(low), make_constant(1, x))
    below = ops.select(ops.less(make_constant(-0.5, x), low), near, far)
    below = ops.multiply(make_constant(node.get_attributes()["alpha"], x), below)
    return ops.select(ops.less_equal(x, make_constant(0, x)), below, x)


def _mish(node: Any) -> Any:
    """Computes mish by exponentials, without cancellation."""
    (x,) = source_outputs(node)
    if element_type(x) not in FLOATS:
        return None
    e = ops.exp(ops.minimum(make_constant(20, x), x))
    n = ops.multiply(e, ops.add(e, make_constant(2, x)))
    bounded = ops.divide(n, ops.add(n, make_constant(2, x)))
    return ops.select(ops.not_equal(x, x), x, ops.multiply(x, bounded))


def _swish(node: Any) -> Any:
    """Computes swish as x / (1 + exp(-x)); the kernel's product underflows."""
    x, *scales = source_outputs(node)
    if element_type(x) not in FLOATS or scales:
        return None
    root = ops.exp(ops.multiply(x, make_constant(-0.5, x)))  # (see `_exp`)
    return ops.divide(x, ops.add(make_constant(1, x), ops.multiply(root, root)))


def _exp(node: Any) -> Any:
    """Computes exp of large x as exp(x / 2) squared; the kernel overflows at 2.4e38."""
    (x,) = source_outputs(node)
    if element_type(x) not in FLOATS:
        return None
    is_large = ops.less(make_constant(80, x), x)
    one = make_constant(1, x)
    root = ops.exp(ops.multiply(x, ops.select(is_large, make_constant(0.5, x), one)))
    result = ops.multiply(root, ops.select(is_large, root, one))
    return ops.select(ops.not_equal(x, x), x, result)


def _softmax(node: Any) -> Any:
    """Computes softmax by its formula: the kernel mishandles NaN and small numbers."""
    (x,) = source_outputs(node)
    if element_type(x) not in FLOATS or _is_merged(x):
        return None
    axis = ops.constant([node.get_attributes()["axis"]], Type.i64)
    below = ops.subtract(x, ops.reduce_max(x, axis, keep_dims=True))
    each = ops.select(ops.not_equal(below, below), below, ops.exp(below))
    return ops.divide(each, ops.reduce_sum(each, axis, keep_dims=True))


def _reshape(node: Any) -> Any:
    """Reshapes to a scalar in two steps: OpenVINO crashes when it fuses one step."""
    shape = node.output(0).get_partial_shape()
    if shape.rank.is_dynamic or shape.rank.get_length():
        return None
    line = ops.reshape(node.input_value(0), ops.constant([1], Type.i64), special_zero=False)
    return ops.squeeze(line, ops.constant([0], Type.i64))


_SUMS, _PRODUCTS = ("Add", "Subtract"), ("Multiply", "Divide")


_MERGED_BY = {**dict.fromkeys(_SUMS, _SUMS + _PRODUCTS), **dict.fromkeys(_PRODUCTS, _PRODUCTS)}
"""Operations on constants, and which ones after them OpenVINO merges with them."""


def _linear(node: Any) -> Any:
    """Puts a no-op between operations on constants that OpenVINO would fold wrongly.

    So (x + C) - C became x, and (x * 1e30) * 1e30 of 0 NaN. A maximum with -inf changes nothing.
    """
    narrow = rewrite_narrow_arithmetic(node)
    if narrow is not None:
        return narrow
    if element_type(node.output(0)) == Type.f16 and _is_computed_with(node):
        return rewrite_float16_overflow(node)
    if element_type(node.output(0)) not in FLOATS or not _has_constant(node):
        return None
    merging = _MERGED_BY[node.get_type_name()]
    readers = [r.get_node() for r in node.output(0).get_target_inputs()]
    names = {r.get_type_name() for r in readers if _has_constant(r)}
    is_bias = any(_is_merged(x, 1) for x in source_outputs(node))  # what follows scales the weights
    if not names & set(_SUMS if is_bias else merging) & set(merging):
        return None
    return ops.maximum(make_constant(-math.inf, node.output(0)), node)


def _is_computed_with(node: Any) -> bool:
    readers = node.output(0).get_target_inputs()
    return any(r.get_node().get_type_name() in _SUMS + _PRODUCTS for r in readers)


def _has_constant(node: Any) -> bool:
    return any(_is_fixed(x) for x in source_outputs(node))


def _is_fixed(source: Output, depth: int = 4) -> bool:
    """Returns whether a value is a constant or model input, possibly cast or reshaped."""
    node = source.get_node()
    if node.get_type_name() in ("Constant", "Parameter"):
        return True
    forms = ("Convert", "ConvertLike", "Reshape", "Unsqueeze", "Broadcast", "Transpose")
    return (
        bool(depth) and node.get_type_name() in forms and _is_fixed(node.input_value(0), depth - 1)
    )


_REWRITES: Mapping[str, Rewrite] = {
    "Abs": rewrite_narrow_arithmetic,
    "Add": _linear,
    "Clamp": _activation(_keeping_nan),
    "Convert": rewrite_convert,
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
    "Negative": rewrite_narrow_arithmetic,
    "NotEqual": _compared,
    "ReduceMax": _reduced_extreme,
    "ReduceMin": _reduced_extreme,
    "ReduceProd": block_reduction_fusion,
    "ReduceSum": block_reduction_fusion,
    "Reshape": _reshape,
    "Relu": _activation(_relu),
    "Select": rewrite_integer_select,
    "Sign": _sign,
    "Softmax": _softmax,
    "Subtract": _linear,
    "Swish": _activation(_swish),
}
"""By the type of the operation."""
