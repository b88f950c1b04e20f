"""Conversions of variances, norms by them, and of log-softmax, with the digits that eager has.

TVM subtracts the squared mean from the mean of squares, and sums exponentials in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from dynamo_backends.tvm.dtypes import NARROW
from dynamo_backends.tvm.vendor import relax

op = relax.op


def moments(importer: Any, x: Any, dims: Sequence[int], correction: float) -> tuple[Any, Any]:
    """Returns the variance and the mean along dimensions that remain, with size 1.

    Args:
        importer: Converts the graph.
        x: Numbers, in the type that they are summed in.
        dims: The dimensions, not negative.
        correction: What is taken from the number of elements before it divides.
    """
    emit, dtype = importer.emit, str(x.ty.dtype)
    count = 1
    for dim in dims:
        count *= int(x.ty.shape[dim])
    mean = emit(op.mean(x, dims, keepdims=True))
    centered = emit(op.subtract(x, mean))
    total = emit(op.sum(emit(op.multiply(centered, centered)), dims, keepdims=True))
    divisor = max(count - correction, 0)
    scale = relax.const(1 / divisor if divisor else float("inf"), dtype)
    return emit(op.multiply(total, scale)), mean


def _variance(importer: Any, node: fx.Node, root: bool = False) -> list[Any]:
    """Variance, or its root, and mean."""
    x, *given = importer.retrieve_args(node)
    emit, dtype = importer.emit, str(x.ty.dtype)
    named: dict[str, Any] = {"correction": 1, **node.kwargs}
    dims, correction = given[0] if given else named.get("dim"), named["correction"]
    keep = node.kwargs.get("keepdim", False)
    dims = [d % x.ty.ndim for d in dims] if dims else list(range(x.ty.ndim))
    x = emit(op.astype(x, "float64"))
    found = list(moments(importer, x, dims, 1 if correction is None else correction))
    if root:
        found[0] = emit(op.sqrt(found[0]))
    if not keep:
        found = [emit(op.squeeze(each, dims)) for each in found]
    return [emit(op.astype(each, dtype)) for each in found]


def _batch_norm(importer: Any, node: fx.Node) -> Any:
    """Normalizes a batch by its own mean and variance, and returns these as well."""
    x, weight, bias, *rest = importer.retrieve_args(node)
    emit, dtype = importer.emit, str(x.ty.dtype)
    running, momentum, eps = rest[:-3], rest[-2], rest[-1]
    if rest[-3] is not True or dtype in NARROW:
        raise ValueError("it does not normalize with batch statistics in float32")
    channels = [1, -1, *[1] * (x.ty.ndim - 2)]
    # Eager's kernels for images sum in float64, that for rows of channels sums in float32.
    precision = dtype if x.ty.ndim == 2 else "float64"
    wide = emit(op.astype(x, precision))
    variance, mean = moments(importer, wide, [d for d in range(x.ty.ndim) if d != 1], 0)
    invstd = emit(op.rsqrt(emit(op.add(variance, relax.const(eps, precision)))))
    variance, mean, invstd = (emit(op.astype(each, dtype)) for each in (variance, mean, invstd))
    result = emit(op.multiply(emit(op.subtract(x, mean)), invstd))
    if weight is not None:
        result = emit(op.multiply(result, emit(op.reshape(weight, channels))))
    if bias is not None:
        result = emit(op.add(result, emit(op.reshape(bias, channels))))
    size = int(x.ty.shape[1])
    count = 1
    for n in x.ty.shape:
        count *= int(n)
    count //= size
    flat = [emit(op.reshape(each, [size])) for each in (mean, variance)]
    results = [result, flat[0], emit(op.reshape(invstd, [size]))]
    scales = (momentum, momentum * count / max(count - 1, 1))
    for old, new, scale in zip(running, flat, scales, strict=False):
        kept = emit(op.multiply(old, relax.const(1 - momentum, dtype)))
        added = emit(op.multiply(new, relax.const(scale, dtype)))
        results.append(emit(op.add(kept, added)))
    return emit(relax.Tuple(results))


def _log_softmax(importer: Any, node: fx.Node) -> Any:
    """Exponentials are summed in float64, and the sum is rounded once, as nearly as eager's."""
    x, dim = importer.retrieve_args(node)[:2]
    emit, dtype = importer.emit, str(x.ty.dtype)
    if dtype in NARROW:
        x = emit(op.astype(x, "float32"))
    below = emit(op.subtract(x, emit(op.max(x, [dim], keepdims=True))))
    terms = emit(op.astype(emit(op.exp(below)), "float64"))
    total = emit(op.astype(emit(op.sum(terms, [dim], keepdims=True)), str(x.ty.dtype)))
    result = emit(op.subtract(below, emit(op.log(total))))
    return emit(op.astype(result, dtype))


STATISTICS: dict[str, Callable[[Any, fx.Node], Any]] = {
    "_log_softmax.default": _log_softmax,
    "_native_batch_norm_legit.no_stats": _batch_norm,
    "_native_batch_norm_legit_functional.default": _batch_norm,
    "std.correction": lambda importer, node: _variance(importer, node, root=True)[0],
    "var.correction": lambda importer, node: _variance(importer, node)[0],
    "var_mean.correction": _variance,
}
"""By the operators' names; each takes the importer and the call."""
