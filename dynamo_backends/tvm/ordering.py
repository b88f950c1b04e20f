"""Conversions of calls that order elements: positions of extrema, sorting.

TVM compares numbers with `<`, which NaN fails, and begins extrema with the least finite number.
Here integers are ordered that stand for the numbers: NaN is the largest, and zeros are equal.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from dynamo_backends.tvm.dtypes import NARROW
from dynamo_backends.tvm.vendor import relax, tvm

op = relax.op

_SORTED = ("int32", "int64")
_BITS = {"float32": "int32", "float64": "int64"}


def _arguments(importer: Any, node: fx.Node, **defaults: Any) -> tuple[Any, ...]:
    """The first argument, and the others by their names."""
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
    """Of the largest or the least element."""

    def convert(importer: Any, node: fx.Node) -> Any:
        x, dim, keep = _arguments(importer, node, dim=None, keepdim=False)
        return importer.emit(extremum(_keys(importer, x, least), dim, keep))

    return convert


def _extremum(extremum: Callable[..., Any], least: bool) -> Callable[[Any, fx.Node], Any]:
    """The largest or the least element, and its position."""

    def convert(importer: Any, node: fx.Node) -> Any:
        x, dim, keep = _arguments(importer, node, dim=0, keepdim=False)
        if x.ty.ndim == 0:
            raise ValueError("it has no dimension")
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


ORDERING: dict[str, Callable[[Any, fx.Node], Any]] = {
    "argmax.default": _position(op.argmax, least=False),
    "argmin.default": _position(op.argmin, least=True),
    "max.dim": _extremum(op.argmax, least=False),
    "min.dim": _extremum(op.argmin, least=True),
    "sort.default": _sort,
    "topk.default": _topk,
}
"""By the operators' names; each takes the importer and the call."""
