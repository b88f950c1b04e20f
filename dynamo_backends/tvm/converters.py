"""TVM's own conversions of ATen calls, and those that are put in their place.

The table is that of TVM's importer of exported programs. It converts matrix products to float32
whatever their dtype, lets indices read outside of their tensor, and loses NaN in maxima.
"""

import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.tvm.bitwise import BITWISE
from dynamo_backends.tvm.dtypes import DTYPES, INTEGERS, NARROW, TO_TORCH
from dynamo_backends.tvm.elementwise import ELEMENTWISE, reduced_extremum
from dynamo_backends.tvm.normalization import STATISTICS
from dynamo_backends.tvm.ordering import ORDERING
from dynamo_backends.tvm.vendor import ExportedProgramImporter, relax, te, topi

Convert = Callable[[fx.Node], Any]


class Importer(ExportedProgramImporter):
    """TVM's importer, for one graph. `env` holds what its nodes have become.

    Args:
        others: Values of nodes at other sizes (see `graph.symbols.elsewhere`), of a graph for a
            range.
        shapes: Shapes of parameters and slices some of whose sizes vary.
    """

    def __init__(
        self,
        others: Mapping[fx.Node, Any] | None = None,
        shapes: Mapping[fx.Node, list[Any]] | None = None,
    ):
        super().__init__()
        self.others = others or {}
        self.shapes = shapes or {}

    def varying(self, node: fx.Node) -> frozenset[int]:
        """Returns the dimensions of a node's tensor whose sizes vary."""
        value, other = node.meta["val"], self.others.get(node)
        if not isinstance(value, torch.Tensor) or other is None:
            return frozenset()
        pairs = enumerate(zip(value.shape, other.shape, strict=True))
        return frozenset(d for d, (n, m) in pairs if n != m)

    def check_fixed(self, node: fx.Node) -> None:
        """Raises `ValueError` if a conversion reads a size that varies."""
        source: Any = node.args[0] if node.args else None
        reads = node.target.__name__ in INDEXED or node.kwargs.get("beta", 1) == 0  # type: ignore[union-attr]
        if reads and any(self.varying(n) for n in (source, node) if isinstance(n, fx.Node)):
            raise ValueError("its conversion needs a dynamic size")

    def create_convert_map(self) -> dict[str, Convert]:
        """Returns the conversions by the operators' names, such as "add.Tensor"."""
        table: dict[str, Convert] = super().create_convert_map()
        table["scatter_add.default"] = self._scatter_add
        for name, (place, negative) in INDEXED.items():
            table[name] = functools.partial(self._with_safe_index, table[name], place, negative)
        own: dict[str, Convert] = {
            "mm.default": self._product,
            "bmm.default": self._product,
            "matmul.default": self._product,
            "addmm.default": self._product_and_sum,
            "baddbmm.default": self._product_and_sum,
            "embedding.default": self._embedding,
            "index_select.default": self._index_select,
            "linalg_vector_norm.default": functools.partial(
                self._vector_norm, table["linalg_vector_norm.default"]
            ),
            "convolution.default": functools.partial(self._convolution_of, table),
            "prod.dim_int": self._product_along,
            "scalar_tensor.default": functools.partial(
                self._size_tensor, table["scalar_tensor.default"]
            ),
            "slice.Tensor": functools.partial(self._slice_of, table["slice.Tensor"]),
        }
        tables = {**ELEMENTWISE, **BITWISE, **ORDERING, **STATISTICS}
        others = {name: functools.partial(convert, self) for name, convert in tables.items()}
        table = {**table, **own, **others}
        for names, wide, narrow in (
            (WRAPPING, "int64", ("int32",)),
            (IN_FLOAT32, "float32", NARROW),
        ):
            for name in names:
                table[name] = functools.partial(self._wider, table[name], wide, narrow)
        return table

    def _wider(self, convert: Convert, wide: str, narrow: Collection[str], node: fx.Node) -> Any:
        """Computes in a wider type, of a result in one of some types.

        TVM promises LLVM that nothing overflows, so LLVM leaves out the cut to 32 bits where the
        next operator of the loop is wider.
        """
        dtype = DTYPES.get(node.meta["val"].dtype)
        if dtype not in narrow:
            return convert(node)
        given, types = {n: self.env[n] for n in node.all_input_nodes}, node.meta["val"]
        for source, value in given.items():
            if isinstance(value, relax.Expr):
                self.env[source] = self.emit(relax.op.astype(value, wide))
        node.meta["val"] = types.to(TO_TORCH[wide])
        try:
            result = convert(node)
        finally:
            self.env.update(given)
            node.meta["val"] = types
        return self.emit(relax.op.astype(result, dtype))

    def emit(self, expression: Any) -> Any:
        """Adds an expression to the function that is being built."""
        return self.block_builder.emit(expression)

    def _matmul(self, a: Any, b: Any) -> Any:
        """Returns a product that is summed in float32 at least, as eager's is."""
        dtype = str(a.ty.dtype)
        if dtype not in NARROW:
            return self.emit(relax.op.matmul(a, b))
        wide = self.emit(relax.op.matmul(a, b, out_dtype="float32"))
        return self.emit(relax.op.astype(wide, dtype))

    def _product(self, node: fx.Node) -> Any:
        a, b = self.retrieve_args(node)[:2]
        return self._matmul(a, b)

    def _product_and_sum(self, node: fx.Node) -> Any:
        start, a, b = self.retrieve_args(node)[:3]
        result = self._scaled(self._matmul(a, b), node.kwargs.get("alpha", 1))
        if node.kwargs.get("beta", 1) == 0:
            shape = [int(n) for n in node.meta["val"].shape]
            return self.emit(relax.op.broadcast_to(result, shape))
        return self.emit(relax.op.add(self._scaled(start, node.kwargs.get("beta", 1)), result))

    def _scaled(self, value: Any, factor: Any) -> Any:
        if factor == 1:
            return value
        return self.emit(relax.op.multiply(value, relax.const(factor, str(value.ty.dtype))))

    def _convolution_of(self, table: dict[str, Convert], node: fx.Node) -> Any:
        """A dense convolution of images gets its filters with output channels innermost.

        With frozen weights they are reordered once; vectors of the schedules are output channels.
        """
        x, weight, bias, stride, padding, dilation, transposed, _, groups = self.retrieve_args(node)
        if transposed or groups != 1 or weight.ty.ndim != 4 or str(x.ty.dtype) in NARROW:
            return table["convolution.default"](node)
        filters = self.emit(relax.op.permute_dims(weight, [2, 3, 1, 0]))
        result = self.emit(
            relax.op.nn.conv2d(
                x, filters, stride, padding, dilation, kernel_layout="HWIO", data_layout="NCHW"
            )
        )
        if bias is None:
            return result
        return self.emit(relax.op.add(result, self.emit(relax.op.reshape(bias, [1, -1, 1, 1]))))

    def _vector_norm(self, convert: Convert, node: fx.Node) -> Any:
        """Powers of float32 numbers are summed in float32, as in eager; of one, its magnitude."""
        arguments: Any = (*node.args, *(None, 2, None, False)[len(node.args) :])
        source, order, dims, keep = arguments
        x, dtype = self.env[source], DTYPES[node.meta["val"].dtype]
        if node.kwargs or order not in (1, 2, math.inf, -math.inf) or str(x.ty.dtype) != dtype:
            return convert(node)
        dims, keep = list(dims) if dims else None, bool(keep)
        absolute = self.emit(relax.op.abs(x))
        if abs(order) == math.inf:
            return reduced_extremum(self, absolute, dims, keep, order > 0)
        value: torch.Tensor = source.meta["val"]
        if order == 1 or value.numel() == node.meta["val"].numel():
            return self.emit(relax.op.sum(absolute, dims, keepdims=keep))
        squares = self.emit(relax.op.multiply(x, x))
        return self.emit(relax.op.sqrt(self.emit(relax.op.sum(squares, dims, keepdims=keep))))

    def _size_tensor(self, convert: Convert, node: fx.Node) -> Any:
        """Returns a size that varies, as a tensor."""
        size: Any = node.args[0]
        dtype = DTYPES[node.meta["val"].dtype]
        if isinstance(size, int) and dtype in INTEGERS:  # which begins again beyond its ends
            return relax.const(int(torch.tensor(size).to(node.meta["val"].dtype)), dtype)
        if isinstance(size, int | float):
            return convert(node)
        return self.block_builder.emit_te(lambda n: topi.full((), dtype, n.astype(dtype)), size)

    def _slice_of(self, convert: Convert, node: fx.Node) -> Any:
        """A slice whose end follows from sizes that vary; TVM does not know that it is within."""
        arguments: Any = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
        source, dim, start, end, step = arguments
        is_plain = isinstance(end, int) or end is None
        if is_plain or not (start is None or (isinstance(start, int) and start >= 0)):
            return convert(node)
        dim, start, shape = dim % node.meta["val"].ndim, start or 0, self.shapes[node]

        def compute(x: Any) -> Any:
            place = lambda i: (*i[:dim], i[dim] * step + start, *i[dim + 1 :])  # noqa: E731
            return te.compute(shape, lambda *i: x(*place(i)))

        return self.block_builder.emit_te(compute, self.env[source])

    def _product_along(self, node: fx.Node) -> Any:
        arguments: Any = self.retrieve_args(node)
        x, dim, *keep = arguments
        x = self.emit(relax.op.astype(x, DTYPES[node.meta["val"].dtype]))
        return self.emit(relax.op.prod(x, [dim], keepdims=bool(keep and keep[0])))

    def _scatter_add(self, node: fx.Node) -> Any:
        x, dim, index, source = self.retrieve_args(node)
        shape = [int(n) for n in index.ty.shape]
        if shape != [int(n) for n in source.ty.shape]:
            starts = [0] * len(shape)
            axes = list(range(len(shape)))
            source = self.emit(relax.op.strided_slice(source, axes, starts, shape))
        return self.emit(relax.op.scatter_elements(x, index, source, dim, "add"))

    def isnan(self, x: Any) -> Any:
        """Returns where numbers are NaN."""
        if str(x.ty.dtype) in NARROW:
            x = self.emit(relax.op.astype(x, "float32"))
        return self.emit(relax.op.isnan(x))

    def _embedding(self, node: fx.Node) -> Any:
        table, index = self.retrieve_args(node)[:2]
        return self.emit(relax.op.take(table, index, axis=0, mode="clip"))

    def _index_select(self, node: fx.Node) -> Any:
        x, dim, index = self.retrieve_args(node)
        return self.emit(relax.op.take(x, index, axis=dim, mode="clip"))

    def _with_safe_index(self, convert: Convert, place: int, negative: bool, node: fx.Node) -> Any:
        """Converts a call with its indices kept inside of the tensor they point into."""
        source: Any = node.args[0]
        sizes = [int(n) for n in source.meta["val"].shape]
        given: Any = node.args[place]
        if isinstance(given, fx.Node):
            dim: Any = node.args[1]
            safe = {given: self._safe(self.env[given], sizes[dim] if sizes else 1, negative)}
            return self._convert_with(convert, node, safe)
        if len([n for n in given if n is not None]) == 1 and "put" not in str(node.target):
            ((dim, index),) = ((i, n) for i, n in enumerate(given) if n is not None)
            safe_index = self._safe(self.env[index], sizes[dim], negative)
            return self.emit(relax.op.take(self.env[source], safe_index, axis=dim, mode="clip"))
        # The same tensor may index several dimensions, so each gets a node of its own.
        indices = [None if n is None else _stand_in(n) for n in given]
        safe = {
            new: self._safe(self.env[old], sizes[i], negative)
            for i, (old, new) in enumerate(zip(given, indices, strict=True))
            if new is not None
        }
        before, node.args = node.args, (*node.args[:place], indices, *node.args[place + 1 :])
        try:
            return self._convert_with(convert, node, safe)
        finally:
            node.args = before

    def _convert_with(self, convert: Convert, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        before = {n: self.env[n] for n in values if n in self.env}
        self.env.update(values)
        try:
            return convert(node)
        finally:
            self.env.update(before)

    def _safe(self, index: Any, size: int, negative: bool) -> Any:
        if str(index.ty.dtype) in ("bool", "uint8"):
            raise ValueError("a mask selects a number of elements that depends on data")
        if negative:
            dtype = str(index.ty.dtype)
            moved = self.emit(relax.op.add(index, relax.const(size, dtype)))
            below = self.emit(relax.op.less(index, relax.const(0, dtype)))
            index = self.emit(relax.op.where(below, moved, index))
        return self._clip(index, size)

    def _clip(self, index: Any, size: int) -> Any:
        dtype = str(index.ty.dtype)
        low, high = relax.const(0, dtype), relax.const(max(size - 1, 0), dtype)
        return self.emit(relax.op.minimum(self.emit(relax.op.maximum(index, low)), high))


def _stand_in(node: fx.Node) -> fx.Node:
    """Returns a node of its own that stands for another one while a call is converted."""
    return fx.Graph().placeholder(node.name)


# Place of the indices among the arguments, and whether they may be negative.
INDEXED: dict[str, tuple[int, bool]] = {
    "gather.default": (2, False),
    "index.Tensor": (1, True),
    "index_put.default": (1, True),
    "scatter.src": (2, False),
    "scatter.value": (2, False),
    "scatter_add.default": (2, False),
}


WRAPPING = (
    "abs.default",
    "add.Scalar",
    "add.Tensor",
    "mul.Scalar",
    "mul.Tensor",
    "neg.default",
    "pow.Tensor_Scalar",
    "rsub.Scalar",
    "rsub.Tensor",
    "square.default",
    "sub.Scalar",
    "sub.Tensor",
)
"""Operators whose results leave int32, and begin again at the other end."""


IN_FLOAT32 = (
    "acosh.default",
    "asinh.default",
    "atan2.default",
    "clamp.Tensor",
    "clamp.default",
    "clamp_max.default",
    "clamp_min.default",
    "copysign.Tensor",
    "cosh.default",
    "fmod.Scalar",
    "fmod.Tensor",
    "gelu.default",
    "linalg_vector_norm.default",
    "mul.Scalar",
    "mul.Tensor",
    "pow.Tensor_Tensor",
    "remainder.Scalar",
    "remainder.Tensor",
    "silu.default",
    "sinh.default",
)
"""Operators that TVM lacks in float16 or bfloat16, or computes with too few digits there."""


@functools.cache
def names() -> frozenset[str]:
    """Returns the operators that can be converted, such as "add.Tensor"."""
    return frozenset(Importer().convert_map)


@functools.cache
def convertible() -> frozenset[OpOverload]:
    """Returns the overloads of ATen that can be converted."""
    found = set()
    for name in names():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if isinstance(op, OpOverload):
            found.add(op)
    return frozenset(found)


def is_convertible(target: Any) -> bool:
    """Returns whether there is a conversion for the target of a call."""
    return target is operator.getitem or target in convertible()
