"""Conversions of elementwise calls and extrema that TVM's importer lacks or gets wrong.

TVM's maximum and minimum give one of the numbers where the other operand is NaN, and its comparison
`!=` of NaN with itself is false. Functions of the C library replace differences of nearly equal
numbers, such as exp(x) - 1, and keep the sign of a zero.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dynamo_backends.tvm.bitwise import broadcast
from dynamo_backends.tvm.dtypes import DTYPES, INTEGERS, NARROW
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
    return importer.emit(op.where(importer.isnan(x), x, result))


def _power(importer: Any, node: fx.Node) -> Any:
    """Small powers are products: TVM's own are a function call for each element."""
    x, exponent = importer.retrieve_args(node)
    dtype = str(x.ty.dtype)
    if dtype != DTYPES[node.meta["val"].dtype]:
        raise ValueError("torch promotes its dtype")
    square = importer.emit(op.multiply(x, x))
    # Eager has no root in its kernels for float16: -inf ** 0.5 is inf there, and NaN elsewhere.
    if exponent in _POWERS and (exponent in (2, 3, 4) or dtype != "float16"):
        return importer.emit(_POWERS[exponent](x, square, relax.const(1, dtype)))
    # As a tensor: TVM warns of constant exponents.
    full = importer.emit(op.full(x.ty.shape, relax.const(exponent, dtype)))
    return importer.emit(op.power(x, full))


_POWERS: dict[float, Callable[[Any, Any, Any], Any]] = {
    2: lambda x, square, one: op.multiply(x, x),
    3: lambda x, square, one: op.multiply(square, x),
    4: lambda x, square, one: op.multiply(square, square),
    0.5: lambda x, square, one: op.sqrt(x),
    -0.5: lambda x, square, one: op.divide(one, op.sqrt(x)),
    -1: lambda x, square, one: op.divide(one, x),
    -2: lambda x, square, one: op.divide(one, square),
}
"""Of a number, its square and one: eager computes these powers likewise."""


def _extremum(better: Callable[[Any, Any], Any]) -> Callable[[Any, fx.Node], Any]:
    def convert(importer: Any, node: fx.Node) -> Any:
        x, y = importer.retrieve_args(node)
        first = importer.emit(better(x, y))
        if torch.is_floating_point(node.meta["val"]):
            first = importer.emit(op.logical_or(first, importer.isnan(x)))
        return importer.emit(op.where(first, x, y))

    return convert


def _reduced_extremum(largest: bool) -> Callable[[Any, fx.Node], Any]:
    """TVM's own begins with a finite number, and compares with NaN."""

    def convert(importer: Any, node: fx.Node) -> Any:
        x, dims, keep = _arguments(importer, node, "self", "dim", "keepdim")
        return reduced_extremum(importer, x, dims, bool(keep), largest)

    return convert


def reduced_extremum(importer: Any, x: Any, dims: Any, keep: bool, largest: bool) -> Any:
    """Returns the largest or the least element along dimensions, NaN if there is one."""
    dtype = str(x.ty.dtype)
    dims = list(dims) if dims else None
    if "float" not in dtype:
        return importer.emit((op.max if largest else op.min)(x, dims, keepdims=keep))
    reduce = extremum_reducer(largest)
    reduced = range(x.ty.ndim) if dims is None else [d % x.ty.ndim for d in dims]

    def each(tensor: Any) -> Any:
        axes = {d: tvm.te.reduce_axis((0, tensor.shape[d])) for d in reduced}
        shape = [1 if d in axes else n for d, n in enumerate(tensor.shape) if keep or d not in axes]

        def element(*index: Any) -> Any:
            given = iter(index)
            if keep:
                place = [axes.get(d, i) for d, i in enumerate(index)]
            else:
                place = [axes[d] if d in axes else next(given) for d in range(len(tensor.shape))]
            return reduce(tensor(*place), axis=list(axes.values()))

        return tvm.te.compute(shape, element, name="extremum")

    return importer.block_builder.emit_te(each, x)


def extremum_reducer(largest: bool = True) -> Callable[..., Any]:
    """Reduces floating-point numbers to the largest or the least, NaN if there is one."""

    def combine(x: Any, y: Any) -> Any:
        select = tvm.tirx.Select  # twice: a condition of two parts takes twice as long
        return select(tvm.tirx.isnan(x), x, select(x > y if largest else x < y, x, y))

    def identity(kind: Any) -> Any:
        return tvm.tirx.const(-math.inf if largest else math.inf, kind)

    reducer: Callable[..., Any] = tvm.te.comm_reducer(combine, identity, "extremum")
    return reducer


def _differs(importer: Any, node: fx.Node) -> Any:
    x, y = importer.retrieve_args(node)
    dtype = str(x.ty.dtype)
    y = y if isinstance(y, relax.Expr) else relax.const(y, dtype)
    result = importer.emit(op.not_equal(x, y))
    if "float" in dtype:
        for side in (x, y):
            result = importer.emit(op.logical_or(result, importer.isnan(side)))
    return result


def _negated(importer: Any, node: fx.Node) -> Any:
    """Negates a comparison; TVM's own makes the opposite one, which NaN fails, too."""
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
    correction = emit(op.multiply(emit(op.multiply(x, square)), series))
    is_small = emit(op.less(emit(op.abs(x)), relax.const(_SMALL_TANH, dtype)))
    return emit(op.where(is_small, _corrected(importer, x, correction), emit(op.tanh(x))))


def _corrected(importer: Any, x: Any, correction: Any) -> Any:
    """Returns the sum of a number and a smaller one; a zero keeps its sign."""
    emit = importer.emit
    is_zero = emit(op.equal(x, relax.const(0, str(x.ty.dtype))))
    return emit(op.where(is_zero, x, emit(op.add(x, correction))))


_SMALL_TANH = 0.35
_TANH_SERIES = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075)
"""Of tanh(x) / x - 1, divided by x ** 2, by powers of x ** 2."""


def _divided(importer: Any, node: fx.Node) -> Any:
    x, y = importer.retrieve_args(node)[:2]
    mode, dtype = node.kwargs.get("rounding_mode"), str(x.ty.dtype)
    if isinstance(y, relax.Expr) or not (mode == "floor" or dtype in INTEGERS):
        return importer._div(node)
    divide = op.floor_divide if mode == "floor" else op.divide  # of integers: towards zero
    return importer.emit(divide(x, relax.const(y, dtype)))


def _negative(importer: Any, node: fx.Node) -> Any:
    (x,) = importer.retrieve_args(node)
    dtype = str(x.ty.dtype)
    if not dtype.startswith("uint"):
        return importer.emit(op.negative(x))
    return importer.emit(op.subtract(relax.const(0, dtype), x))


def _expm1(importer: Any, node: fx.Node) -> Any:
    (x,) = importer.retrieve_args(node)
    return expm1(importer, x)


def expm1(importer: Any, x: Any) -> Any:
    """By a series near zero, where the difference of exp(x) and 1 loses digits."""
    dtype, emit = str(x.ty.dtype), importer.emit
    if dtype == "float64":
        return importer.block_builder.emit_te(_each_by_c("expm1", dtype), x)
    series = relax.const(_EXPM1_SERIES[-1], dtype)
    for factor in reversed(_EXPM1_SERIES[:-1]):
        series = emit(op.add(emit(op.multiply(series, x)), relax.const(factor, dtype)))
    correction = emit(op.multiply(emit(op.multiply(x, x)), series))
    is_small = emit(op.less(emit(op.abs(x)), relax.const(_SMALL_EXPM1, dtype)))
    large = emit(op.subtract(emit(op.exp(x)), relax.const(1, dtype)))
    return emit(op.where(is_small, _corrected(importer, x, correction), large))


_SMALL_EXPM1 = 0.5
_EXPM1_SERIES = tuple(1 / math.factorial(n) for n in range(2, 9))
"""Of exp(x) - 1 - x, divided by x ** 2, by powers of x."""


def _elu(importer: Any, node: fx.Node) -> Any:
    """TVM's own loses NaN, and digits near zero."""
    x, *factors = importer.retrieve_args(node)
    names = dict(zip(("alpha", "scale", "input_scale"), factors, strict=False))
    alpha, scale, inner = (
        {**names, **node.kwargs}.get(name, 1) for name in ("alpha", "scale", "input_scale")
    )
    dtype, emit = str(x.ty.dtype), importer.emit

    def times(value: Any, factor: float) -> Any:
        return value if factor == 1 else emit(op.multiply(value, relax.const(factor, dtype)))

    below = times(expm1(importer, times(x, inner)), alpha * scale)
    positive = emit(op.greater(x, relax.const(0, dtype)))
    return emit(op.where(positive, times(x, scale), below))


def _number_of_two(better: Callable[[Any, Any], Any]) -> Callable[[Any, fx.Node], Any]:
    """Returns the extremum of two operands, and of NaN and a number the number."""

    def convert(importer: Any, node: fx.Node) -> Any:
        x, y = importer.retrieve_args(node)
        first = importer.emit(op.logical_or(importer.emit(better(x, y)), importer.isnan(y)))
        return importer.emit(op.where(first, x, y))

    return convert


def _remainder(importer: Any, node: fx.Node) -> Any:
    """Computes a remainder with the divisor's sign; TVM's of infinity is NaN."""
    x, y = importer.retrieve_args(node)
    dtype, emit = DTYPES[node.meta["val"].dtype], importer.emit
    if "float" not in dtype:
        return importer._binary_op(op.floor_mod, operator.mod)(node)
    x, y = (v if isinstance(v, relax.Expr) else relax.const(v, dtype) for v in (x, y))
    rest, zero = emit(op.mod(x, y)), relax.const(0, dtype)
    signs = [emit(op.less(each, zero)) for each in (rest, y)]
    other = emit(op.logical_xor(*signs))
    moves = emit(op.logical_and(other, emit(op.not_equal(rest, zero))))
    return emit(op.where(moves, emit(op.add(rest, y)), rest))


def _sign(importer: Any, node: fx.Node) -> Any:
    (x,) = importer.retrieve_args(node)
    dtype = str(x.ty.dtype)
    if not dtype.startswith("uint"):
        return importer.emit(op.sign(x))
    differs = importer.emit(op.not_equal(x, relax.const(0, dtype)))
    return importer.emit(op.astype(differs, dtype))


def _from_c(function: str) -> Callable[[Any, fx.Node], Any]:
    """Returns a call of the C library's function for each element."""

    def convert(importer: Any, node: fx.Node) -> Any:
        operands = broadcast(importer, node)
        each = _each_by_c(function, DTYPES[node.meta["val"].dtype])
        return importer.block_builder.emit_te(each, *operands)

    return convert


def _each_by_c(function: str, dtype: str) -> Callable[..., Any]:
    wide = "float32" if dtype in NARROW else dtype
    names = {"float32": f"{function}f", "float64": function}
    if wide not in names:
        raise ValueError(f"the C library has no function {function} for {dtype}")

    def each(*tensors: Any) -> Any:
        def element(*index: Any) -> Any:
            given = [tensor(*index).astype(wide) for tensor in tensors]
            result = tvm.tirx.call_pure_extern(wide, names[wide], *given)
            return result.astype(dtype)

        return tvm.te.compute(tensors[0].shape, element, name=function)

    return each


ELEMENTWISE: dict[str, Callable[[Any, fx.Node], Any]] = {
    "amax.default": _reduced_extremum(largest=True),
    "amin.default": _reduced_extremum(largest=False),
    "atanh.default": _from_c("atanh"),
    "clamp.Tensor": _clamp,  # also what type promotion makes of the other
    "clamp.default": _clamp,
    "clamp_max.default": _clamp_max,
    "clamp_min.default": _clamp_min,
    "div.Tensor_mode": _divided,
    "elu.default": _elu,
    "erfc.default": _from_c("erfc"),
    "exp2.default": _from_c("exp2"),
    "expm1.default": _expm1,
    "fmax.default": _number_of_two(op.greater_equal),
    "fmin.default": _number_of_two(op.less_equal),
    "hypot.default": _from_c("hypot"),
    "hardtanh.default": _hardtanh,
    "lgamma.default": _from_c("lgamma"),
    "log1p.default": _from_c("log1p"),
    "logical_not.default": _negated,
    "maximum.default": _extremum(op.greater),
    "minimum.default": _extremum(op.less),
    "ne.Scalar": _differs,
    "ne.Tensor": _differs,
    "neg.default": _negative,
    "pow.Tensor_Scalar": _power,
    "relu.default": _relu,
    "remainder.Scalar": _remainder,
    "remainder.Tensor": _remainder,
    "sign.default": _sign,
    "tanh.default": _tanh,
}
"""By the operators' names; each takes the importer and the call."""
