"""Conversions that read bits of numbers: signs, casts to bfloat16, shifts, products with zero."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dynamo_backends.tvm.dtypes import DTYPES
from dynamo_backends.tvm.vendor import relax, tvm

op = relax.op

_SIGN = {"float32": ("uint32", 1 << 31), "float64": ("uint64", 1 << 63)}
"""Types of a number's bits, and the one of its sign."""


def _sign_bit(value: Any, dtype: str) -> Any:
    """Returns the bit of a number's sign."""
    kind, sign = _SIGN[dtype]
    return tvm.tirx.reinterpret(kind, value) & tvm.tirx.const(sign, kind)


def _product(importer: Any, node: fx.Node) -> Any:
    """TVM's product with the constant 0 is 0 also for infinities, and it has none of bool."""
    x, y = importer.retrieve_args(node)
    dtype = DTYPES[node.meta["val"].dtype]
    if dtype == "bool":
        return importer.emit(op.logical_and(x, y))
    y = _number(node.args[1], y)
    if isinstance(y, relax.Expr) or y != 0 or dtype not in _SIGN:
        return importer._binary_op(op.multiply, operator.mul)(node)
    kind, sign = _SIGN[dtype]
    flip = tvm.tirx.const(sign if math.copysign(1, y) < 0 else 0, kind)

    def each(tensor: Any) -> Any:
        def element(*index: Any) -> Any:
            value = tensor(*index)
            zero = tvm.tirx.reinterpret(dtype, _sign_bit(value, dtype) ^ flip)
            is_finite = tvm.tirx.abs(value) <= tvm.tirx.max_value(dtype)
            return tvm.tirx.Select(is_finite, zero, tvm.tirx.const(float("nan"), dtype))

        return tvm.te.compute(tensor.shape, element, name="times_zero")

    return importer.block_builder.emit_te(each, x)


def _number(argument: Any, value: Any) -> Any:
    """Returns the number that an argument is, or its value if it is none."""
    if isinstance(argument, fx.Node) and argument.target is torch.ops.aten.scalar_tensor.default:
        return argument.args[0]
    return value


def _signbit(importer: Any, node: fx.Node) -> Any:
    (x,) = importer.retrieve_args(node)
    dtype = str(x.ty.dtype)
    if dtype not in _SIGN:
        raise ValueError("its dtype is not float32 or float64")

    def each(tensor: Any) -> Any:
        def element(*index: Any) -> Any:
            return _sign_bit(tensor(*index), dtype) != tvm.tirx.const(0, _SIGN[dtype][0])

        return tvm.te.compute(tensor.shape, element, name="signbit")

    return importer.block_builder.emit_te(each, x)


def _copysign(importer: Any, node: fx.Node) -> Any:
    x, y = broadcast(importer, node)
    dtype = str(x.ty.dtype)
    if dtype not in _SIGN:
        raise ValueError("its dtype is not float32 or float64")
    kind, sign = _SIGN[dtype]

    def each(x: Any, y: Any) -> Any:
        def element(*index: Any) -> Any:
            number = tvm.tirx.reinterpret(kind, x(*index))
            magnitude = number & tvm.tirx.const(sign - 1, kind)
            return tvm.tirx.reinterpret(dtype, magnitude | _sign_bit(y(*index), dtype))

        return tvm.te.compute(x.shape, element, name="copysign")

    return importer.block_builder.emit_te(each, x, y)


def broadcast(importer: Any, node: fx.Node) -> list[Any]:
    """Two operands, with the shape and the type of the result."""
    value = node.meta["val"]
    shape, dtype = list(value.shape), DTYPES[value.dtype]
    operands = [
        each if isinstance(each, relax.Expr) else relax.const(each, dtype)
        for each in importer.retrieve_args(node)
    ]
    if any(str(each.ty.dtype) != dtype for each in operands):
        raise ValueError("torch promotes its dtype")
    return [importer.emit(op.broadcast_to(each, shape)) for each in operands]


def _shift(left: bool) -> Callable[[Any, fx.Node], Any]:
    """By less than the width of the type; eager defines what is beyond, and processors do not."""

    def convert(importer: Any, node: fx.Node) -> Any:
        x, count = importer.retrieve_args(node)
        dtype, emit = str(x.ty.dtype), importer.emit
        bits = torch.iinfo(node.meta["val"].dtype).bits
        if isinstance(count, relax.Expr):
            if str(count.ty.dtype) != dtype:
                raise ValueError("torch promotes its dtype")
        else:
            count = relax.const(count if 0 <= count < bits else bits, dtype)
        zero, most = relax.const(0, dtype), relax.const(bits - 1, dtype)
        beyond = emit(op.logical_or(emit(op.greater(count, most)), emit(op.less(count, zero))))
        within = emit(op.where(beyond, most, count))
        shifted = emit((op.left_shift if left else op.right_shift)(x, within))
        if left or dtype.startswith("uint"):
            return emit(op.where(beyond, zero, shifted))
        return shifted

    return convert


def _cast(importer: Any, node: fx.Node) -> Any:
    """Returns a cast that rounds: TVM computes bfloat16 in float32, without casts in a loop."""
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


BITWISE: dict[str, Callable[[Any, fx.Node], Any]] = {
    "__lshift__.Scalar": _shift(left=True),
    "__lshift__.Tensor": _shift(left=True),
    "__rshift__.Scalar": _shift(left=False),
    "__rshift__.Tensor": _shift(left=False),
    "_to_copy.default": _cast,
    "copysign.Tensor": _copysign,
    "mul.Scalar": _product,
    "mul.Tensor": _product,
    "signbit.default": _signbit,
}
"""By the operators' names; each takes the importer and the call."""
