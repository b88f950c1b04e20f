"""Conversions of elementwise calls and extrema that TVM's importer lacks or gets wrong.

TVM's maximum and minimum give one of the numbers where the other operand is NaN, and its comparison
`!=` of NaN with itself is false. Functions of the C library replace differences of nearly equal
numbers, such as exp(x) - 1, and keep the sign of a zero.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dynamo_backends.tvm.dtypes import DTYPES, NARROW
from dynamo_backends.tvm.vendor import relax, tvm

op = relax.op


def _relu(importer: Any, node: fx.Node) -> Any:
    return _bounded(importer, importer.retrieve_args(node)[0], 0, None)


def _clamp(importer: Any, node: fx.Node) -> Any:
    x, low, high = _arguments(importer, node, "self", "min", "max")
    return _bounded(importer, x, low, high)


def _clamp_min(importer: Any, node: fx.Node) -> Any:
    x, low = _arguments(importer, node, "self", "min")
    return _bounded(importer, x, low, None)


def _clamp_max(importer: Any, node: fx.Node) -> Any:
    x, high = _arguments(importer, node, "self", "max")
    return _bounded(importer, x, None, high)


def _hardtanh(importer: Any, node: fx.Node) -> Any:
    x, low, high = _arguments(importer, node, "self", "min_val", "max_val")
    return _bounded(importer, x, -1 if low is None else low, 1 if high is None else high)


def _arguments(importer: Any, node: fx.Node, *names: str) -> list[Any]:
    given = dict(zip(names, importer.retrieve_args(node), strict=False))
    return [given.get(name, node.kwargs.get(name)) for name in names]


def _bounded(importer: Any, x: Any, low: Any, high: Any) -> Any:
    dtype, result = str(x.ty.dtype), x
    for bound, extremum in ((low, op.maximum), (high, op.minimum)):
        if bound is not None:
            limit = bound if isinstance(bound, relax.Expr) else relax.const(bound, dtype)
            result = importer.emit(extremum(result, limit))
    if "float" not in dtype:
        return result
    return importer.emit(op.where(importer.emit(op.isnan(x)), x, result))


def _power(importer: Any, node: fx.Node) -> Any:
    """Small powers are products: TVM's own are a function call for each element."""
    x, exponent = importer.retrieve_args(node)
    dtype = str(x.ty.dtype)
    (base, *_) = node.all_input_nodes
    if base.meta["val"].dtype != node.meta["val"].dtype:
        raise ValueError("torch promotes its type")
    if exponent in (2, 3, 4):
        square = importer.emit(op.multiply(x, x))
        return (
            square
            if exponent == 2
            else importer.emit(op.multiply(square, x if exponent == 3 else square))
        )
    # As a tensor: TVM warns of constant exponents.
    full = importer.emit(op.full(x.ty.shape, relax.const(exponent, dtype)))
    return importer.emit(op.power(x, full))


def _extremum(better: Callable[[Any, Any], Any]) -> Callable[[Any, fx.Node], Any]:
    def convert(importer: Any, node: fx.Node) -> Any:
        x, y = importer.retrieve_args(node)
        first = importer.emit(better(x, y))
        if torch.is_floating_point(node.meta["val"]):
            first = importer.emit(op.logical_or(first, importer.emit(op.isnan(x))))
        return importer.emit(op.where(first, x, y))

    return convert


def _reduced_extremum(reduce: Callable[..., Any]) -> Callable[[Any, fx.Node], Any]:
    def convert(importer: Any, node: fx.Node) -> Any:
        x, dims, keep = _arguments(importer, node, "self", "dim", "keepdim")
        dims, keep, dtype = list(dims) if dims else None, bool(keep), str(x.ty.dtype)
        result = importer.emit(reduce(x, dims, keepdims=keep))
        if not torch.is_floating_point(node.meta["val"]):
            return result
        marks = importer.emit(op.astype(importer.emit(op.isnan(x)), dtype))
        found = importer.emit(op.max(marks, dims, keepdims=keep))
        lost = importer.emit(op.greater(found, relax.const(0, dtype)))
        return importer.emit(op.where(lost, relax.const(float("nan"), dtype), result))

    return convert


def _differs(importer: Any, node: fx.Node) -> Any:
    x, y = importer.retrieve_args(node)
    dtype = str(x.ty.dtype)
    y = y if isinstance(y, relax.Expr) else relax.const(y, dtype)
    result = importer.emit(op.not_equal(x, y))
    if "float" in dtype:
        for side in (x, y):
            result = importer.emit(op.logical_or(result, importer.emit(op.isnan(side))))
    return result


def _negated(importer: Any, node: fx.Node) -> Any:
    """Of a comparison in the same loop, TVM's own makes the opposite one, which NaN fails, too."""
    (x,) = importer.retrieve_args(node)
    x = x if str(x.ty.dtype) == "bool" else importer.emit(op.astype(x, "bool"))
    return importer.emit(op.bitwise_not(x))


def _tanh(importer: Any, node: fx.Node) -> Any:
    """By a series near zero, where the quotient of exponentials of TVM's own loses digits."""
    (x,) = importer.retrieve_args(node)
    dtype, emit = str(x.ty.dtype), importer.emit
    if dtype == "float64":
        return _from_c("tanh")(importer, node)
    square = emit(op.multiply(x, x))
    series = relax.const(_TANH_SERIES[-1], dtype)
    for factor in reversed(_TANH_SERIES[:-1]):
        series = emit(op.add(emit(op.multiply(series, square)), relax.const(factor, dtype)))
    correction = emit(op.multiply(emit(op.multiply(x, square)), series))  # keeps the sign of a zero
    is_small = emit(op.less(emit(op.abs(x)), relax.const(_SMALL_TANH, dtype)))
    return emit(op.where(is_small, emit(op.add(x, correction)), emit(op.tanh(x))))


_SMALL_TANH = 0.35
_TANH_SERIES = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075)
"""Of tanh(x) / x - 1, divided by x ** 2, by powers of x ** 2."""


def _divided(importer: Any, node: fx.Node) -> Any:
    x, y = importer.retrieve_args(node)[:2]
    if node.kwargs.get("rounding_mode") != "floor" or isinstance(y, relax.Expr):
        return importer._div(node)
    return importer.emit(op.floor_divide(x, relax.const(y, str(x.ty.dtype))))


def _cast(importer: Any, node: fx.Node) -> Any:
    """A cast that rounds: TVM computes bfloat16 in float32, without casts in a loop."""
    (x,) = importer.retrieve_args(node)[:1]
    given, dtype = str(x.ty.dtype), DTYPES.get(node.meta["val"].dtype)
    if dtype != "bfloat16" or given == dtype or "float" not in given:
        return importer._to_copy(node)

    def each(tensor: Any) -> Any:
        def element(*index: Any) -> Any:
            value = tensor(*index).astype("float32")
            bits = tvm.tirx.reinterpret("uint32", value)
            odd = (bits >> tvm.tirx.const(16, "uint32")) & tvm.tirx.const(1, "uint32")
            bits = bits + tvm.tirx.const(0x7FFF, "uint32") + odd  # to the nearest, ties to even
            bits = bits & tvm.tirx.const(0xFFFF0000, "uint32")
            rounded = tvm.tirx.reinterpret("float32", bits)
            chosen = tvm.tirx.if_then_else(tvm.tirx.isnan(value), value, rounded)
            return chosen.astype("bfloat16")

        return tvm.te.compute(tensor.shape, element, name="round_to_bfloat16")

    return importer.block_builder.emit_te(each, x)


def _from_c(function: str) -> Callable[[Any, fx.Node], Any]:
    """A call of the C library's function for each element."""

    def convert(importer: Any, node: fx.Node) -> Any:
        (x,) = importer.retrieve_args(node)
        dtype = DTYPES[node.meta["val"].dtype]
        wide = "float32" if dtype in NARROW else dtype
        names = {"float32": f"{function}f", "float64": function}
        if wide not in names or str(x.ty.dtype) != dtype:
            raise ValueError(f"the C library has no {function} for {dtype}")

        def each(tensor: Any) -> Any:
            def element(*index: Any) -> Any:
                given = tensor(*index).astype(wide)
                result = tvm.tirx.call_pure_extern(wide, names[wide], given)
                return result.astype(dtype)

            return tvm.te.compute(tensor.shape, element, name=function)

        return importer.block_builder.emit_te(each, x)

    return convert


ELEMENTWISE: dict[str, Callable[[Any, fx.Node], Any]] = {
    "_to_copy.default": _cast,
    "amax.default": _reduced_extremum(op.max),
    "amin.default": _reduced_extremum(op.min),
    "atanh.default": _from_c("atanh"),
    "clamp.Tensor": _clamp,  # also what type promotion makes of the other
    "clamp.default": _clamp,
    "clamp_max.default": _clamp_max,
    "clamp_min.default": _clamp_min,
    "div.Tensor_mode": _divided,
    "erfc.default": _from_c("erfc"),
    "expm1.default": _from_c("expm1"),
    "hardtanh.default": _hardtanh,
    "lgamma.default": _from_c("lgamma"),
    "log1p.default": _from_c("log1p"),
    "logical_not.default": _negated,
    "maximum.default": _extremum(op.greater),
    "minimum.default": _extremum(op.less),
    "ne.Scalar": _differs,
    "ne.Tensor": _differs,
    "pow.Tensor_Scalar": _power,
    "relu.default": _relu,
    "tanh.default": _tanh,
}
"""By the operators' names; each takes the importer and the call."""
