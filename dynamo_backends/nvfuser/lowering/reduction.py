"""Sums, extrema and statistics over dimensions, and matrix products.

The halves are summed in float32 and rounded once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynamo_backends.nvfuser.dtypes import NAMES, compute_dtype
from dynamo_backends.nvfuser.lowering.registry import Call, Unsupported, register_lowering
from dynamo_backends.nvfuser.recorder import Number, Value

Dims = int | Sequence[int] | None


def widen(x: Value) -> Value:
    """Returns the halves as float32, everything else as it is."""
    return x.cast(compute_dtype(x.dtype))


def _summand(call: Call, x: Value, dtype: torch.dtype | None) -> Value:
    """Returns what is summed, in the type in which it is."""
    if dtype is not None and dtype not in NAMES:
        raise Unsupported(f"nvFuser does not compute with {dtype}")
    if x.is_floating_point:
        wider = dtype if dtype is not None and dtype.itemsize > x.dtype.itemsize else x.dtype
        return x.cast(compute_dtype(wider))
    return x.cast(compute_dtype(call.dtype) if call.dtype.is_floating_point else torch.int64)


def _reduction(reduce: Callable[[Value, Any, bool], Value]) -> Callable[..., Value]:
    def lowering(
        call: Call,
        x: Value,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Value:
        return reduce(_summand(call, x, dtype), x.dims(dim), keepdim)

    return lowering


register_lowering("sum.default", "sum.dim_IntList", context=True)(_reduction(Value.sum))
register_lowering("mean.default", "mean.dim", context=True)(_reduction(Value.mean))
register_lowering("prod.default", "prod.dim_int", context=True)(
    _reduction(lambda x, dims, keepdim: x.reduce("prod", dims, keepdim))
)


def _extreme(op: str) -> Callable[..., Value]:
    def lowering(x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
        kind = torch.int32 if x.dtype == torch.bool else compute_dtype(x.dtype)
        return x.cast(kind).reduce(op, x.dims(dim), keepdim)

    return lowering


register_lowering("amax.default", "max.default")(_extreme("max"))
register_lowering("amin.default", "min.default")(_extreme("min"))


def _dims_or_none(x: Value, dim: Dims) -> tuple[int, ...]:
    """Unlike in other reductions, an empty list of dimensions reduces none."""
    none = dim is not None and not isinstance(dim, int) and len(dim) == 0
    return () if none else x.dims(dim)


@register_lowering("any.default", "any.dim", "any.dims")
def any_(x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    truths = x.cast(torch.bool).cast(torch.int32)
    return truths.reduce("max", _dims_or_none(x, dim), keepdim).cast(torch.bool)


def variance(
    x: Value, dims: Sequence[int], correction: float | None, keepdim: bool
) -> tuple[Value, Value]:
    """Variance and mean along some dimensions.

    Raises:
        Unsupported: nvFuser has none for so few elements, or for such a correction.
    """
    correction = 1 if correction is None else correction
    count = x.elements(dims)
    if correction != int(correction) or correction < 0:
        raise Unsupported(f"nvFuser's variance does not support correction={correction}")
    if count <= max(correction, 1):
        raise Unsupported(
            "the number of elements is not larger than the correction of the variance"
        )
    return x.recorder.var_mean(widen(x), dims, int(correction), keepdim)


@register_lowering("var.correction")
def var(
    x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Value:
    return variance(x, x.dims(dim), correction, keepdim)[0]


@register_lowering("var_mean.correction")
def var_mean(
    x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    return variance(x, x.dims(dim), correction, keepdim)


@register_lowering("linalg_vector_norm.default")
def vector_norm(
    x: Value,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    x = widen(x if dtype is None else x.cast(dtype))
    over, size = x.dims(dim), x.unary("abs")
    if ord == 0:
        return x.differs(0).cast(x.dtype).sum(over, keepdim)
    if ord == math.inf:
        return size.reduce("max", over, keepdim)
    if ord == -math.inf:
        return size.reduce("min", over, keepdim)
    if ord == 1:
        return size.sum(over, keepdim)
    if ord == 2:
        return (x * x).sum(over, keepdim).unary("sqrt")
    return size.binary("pow", ord).sum(over, keepdim).binary("pow", 1 / ord)


PRODUCTS = frozenset(
    f"aten.{name}"
    for name in ("mm.default", "bmm.default", "addmm.default", "addbmm.default", "addmv.default",
                 "mv.default", "dot.default")
)  # fmt: skip
"""The overloads that are matrix products."""


def _product(x: Value, y: Value, shape: tuple[int, ...]) -> Value:
    if not x.is_floating_point:
        raise Unsupported("products of integer matrices are left to eager")
    return x.recorder.tensor("matmul", (x, y), shape, x.dtype)


@register_lowering("mm.default")
def mm(x: Value, y: Value) -> Value:
    return _product(x, y, (x.shape[0], y.shape[1]))


@register_lowering("bmm.default")
def bmm(x: Value, y: Value) -> Value:
    return _product(x, y, (*x.shape[:2], y.shape[2]))


@register_lowering("addbmm.default")
def addbmm(bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    products = bmm(x, y)
    return _added(bias, products.cast(compute_dtype(products.dtype)).sum((0,)), beta, alpha)


@register_lowering("addmv.default")
def addmv(bias: Value, x: Value, vector: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return _added(bias, mv(x, vector), beta, alpha)


@register_lowering("mv.default")
def mv(x: Value, vector: Value) -> Value:
    return _product(x, vector, x.shape[:1])


@register_lowering("dot.default")
def dot(x: Value, y: Value) -> Value:
    return _product(x, y, ())


@register_lowering("addmm.default")
def addmm(bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    shape = (x.shape[0], y.shape[1])
    if bias.shape == shape[1:] and beta == 1 and alpha == 1 and x.is_floating_point:
        # The bias is added before the halves are rounded, as in eager.
        arguments = (x, y.permute((1, 0)), bias)
        return x.recorder.tensor("linear", arguments, shape, x.dtype)
    return _added(bias, _product(x, y, shape), beta, alpha)


def _added(bias: Value, product: Value, beta: Number, alpha: Number) -> Value:
    kind = compute_dtype(product.dtype)
    product = product.cast(kind)
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    bias = bias.cast(kind)
    return product + (bias if beta == 1 else bias * beta)
