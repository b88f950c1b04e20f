"""Conversions of calls that order elements: positions of extrema, sorting, maximum pools.

TVM compares numbers with `<`, which NaN fails, and begins extrema with the least finite number.
Here integers are ordered that stand for the numbers: NaN is the largest, and zeros are equal.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from dynamo_backends.tvm.dtypes import NARROW
from dynamo_backends.tvm.elementwise import extremum_reducer
from dynamo_backends.tvm.vendor import relax, topi, tvm

op = relax.op

_SORTED = ("int32", "int64")
_BITS = {"float32": "int32", "float64": "int64"}


def _arguments(importer: Any, node: fx.Node, **defaults: Any) -> tuple[Any, ...]:
    """Returns the first argument, and the others by their names."""
    x, *given = importer.retrieve_args(node)
    named = dict(zip(defaults, given, strict=False))
    return x, *({**defaults, **named, **node.kwargs}[name] for name in defaults)


def _keys(importer: Any, x: Any, least_nan: bool = False) -> Any:
    """Integers in the order of numbers.

    Args:
        importer: Converts the graph.
        x: Numbers; integers are their own keys.
        least_nan: NaN is the least instead of the largest.
    """
    dtype = str(x.ty.dtype)
    if "float" not in dtype:
        return x if dtype in _SORTED else importer.emit(op.astype(x, "int32"))
    if dtype in NARROW:
        x, dtype = importer.emit(op.astype(x, "float32")), "float32"
    bits = _BITS[dtype]
    bounds = tvm.tirx.min_value, tvm.tirx.max_value
    nan = bounds[not least_nan](bits)

    def each(tensor: Any) -> Any:
        def element(*index: Any) -> Any:
            value = tensor(*index)
            key = tvm.tirx.reinterpret(bits, value)
            key = tvm.tirx.Select(key < tvm.tirx.const(0, bits), key ^ bounds[1](bits), key)
            zero = tvm.tirx.const(0, bits)
            key = tvm.tirx.Select(value == tvm.tirx.const(0, dtype), zero, key)
            return tvm.tirx.Select(tvm.tirx.isnan(value), nan, key)

        return tvm.te.compute(tensor.shape, element, name="order")

    return importer.block_builder.emit_te(each, x)


def _position(extremum: Callable[..., Any], least: bool) -> Callable[[Any, fx.Node], Any]:
    """Returns the position of the largest or the least element."""

    def convert(importer: Any, node: fx.Node) -> Any:
        x, dim, keep = _arguments(importer, node, dim=None, keepdim=False)
        return importer.emit(extremum(_keys(importer, x, least), dim, keep))

    return convert


def _extremum(extremum: Callable[..., Any], least: bool) -> Callable[[Any, fx.Node], Any]:
    """Returns the largest or the least element, and its position."""

    def convert(importer: Any, node: fx.Node) -> Any:
        x, dim, keep = _arguments(importer, node, dim=0, keepdim=False)
        if x.ty.ndim == 0:
            raise ValueError("it has no dimensions")
        indices = importer.emit(extremum(_keys(importer, x, least), dim, True))
        found = [importer.emit(op.gather_elements(x, indices, axis=dim)), indices]
        if not keep:
            found = [importer.emit(op.squeeze(each, [dim])) for each in found]
        return importer.emit(relax.Tuple(found))

    return convert


def _sort(importer: Any, node: fx.Node) -> Any:
    x, dim, descending = _arguments(importer, node, dim=-1, descending=False)
    keys = _keys(importer, x)
    indices = importer.emit(op.argsort(keys, dim, descending, dtype="int64"))
    values = importer.emit(op.gather_elements(x, indices, axis=dim))
    return importer.emit(relax.Tuple([values, indices]))


def _topk(importer: Any, node: fx.Node) -> Any:
    x, k, dim, largest = _arguments(importer, node, k=1, dim=-1, largest=True)
    keys = _keys(importer, x)
    indices = importer.emit(
        op.topk(keys, k=k, axis=dim, largest=largest, ret_type="indices", dtype="int64")
    )
    values = importer.emit(op.gather_elements(x, indices, axis=dim))
    return importer.emit(relax.Tuple([values, indices]))


def _max_pool(importer: Any, node: fx.Node) -> Any:
    """Returns the largest number of each window, NaN if there is one; without its position."""
    x, size, stride, padding, dilation, ceil = _arguments(
        importer, node, size=(), stride=(), padding=0, dilation=1, ceil=False
    )
    count = 2 if "2d" in str(node.target) else 3
    dtype, first = str(x.ty.dtype), x.ty.ndim - count
    is_float = "float" in dtype
    if ceil and any(d >= first for d in importer.varying(node.args[0])):
        raise ValueError("the number of its windows depends on a dynamic size")
    windows = [
        [given[min(i, len(given) - 1)] if isinstance(given, list | tuple) else given
         for given in (size, stride or size, padding, dilation)]
        for i in range(count)
    ]  # fmt: skip
    numbers = node.meta["val"][0].shape[first:]

    def each(tensor: Any) -> Any:
        shape, before, after = list(tensor.shape[:first]), [0] * first, [0] * first
        for n, number, (k, s, p, d) in zip(tensor.shape[first:], numbers, windows, strict=True):
            reach, is_fixed = d * (k - 1) + 1, isinstance(n, tvm.tirx.IntImm)
            shape.append(int(number) if is_fixed else (n + 2 * p - reach) // s + 1)
            before.append(p)
            after.append(max((int(number) - 1) * s + reach - p - int(n), 0) if is_fixed else p)
        if any((*before, *after)):
            kind = tensor.dtype
            least = tvm.tirx.const(-math.inf, kind) if is_float else tvm.tirx.min_value(kind)
            tensor = topi.nn.pad(tensor, before, after, least)
        axes = [tvm.te.reduce_axis((0, k)) for k, *_ in windows]

        def element(*index: Any) -> Any:
            steps = zip(index[first:], axes, windows, strict=True)
            place = [i * s + axis * d for i, axis, (_, s, _, d) in steps]
            return reduce(tensor(*index[:first], *place), axis=axes)

        return tvm.te.compute(shape, element, name="max_pool")

    reduce = extremum_reducer() if is_float else tvm.te.max
    if dtype in NARROW:
        x = importer.emit(op.astype(x, "float32"))
    result = importer.block_builder.emit_te(each, x)
    return importer.emit(op.astype(result, dtype)) if dtype in NARROW else result


ORDERING: dict[str, Callable[[Any, fx.Node], Any]] = {
    "argmax.default": _position(op.argmax, least=False),
    "argmin.default": _position(op.argmin, least=True),
    "max.dim": _extremum(op.argmax, least=False),
    "max_pool2d_with_indices.default": _max_pool,
    "max_pool3d_with_indices.default": _max_pool,
    "min.dim": _extremum(op.argmin, least=True),
    "sort.default": _sort,
    "topk.default": _topk,
}
"""By the operators' names; each takes the importer and the call."""
