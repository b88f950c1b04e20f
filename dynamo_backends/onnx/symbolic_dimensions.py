"""Symbolic sizes inside ONNX models, and writes to rows of a tensor."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.call_decomposition import ORIGIN, get_origin_name
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import (
    SIZES,
    SizeWithExpression,
    collect_varying_sizes,
    sizes_of,
)
from dynamo_backends.interface.errors import CompileError


class SymbolicDimensions:
    """The symbolic sizes of a graph: lifts them out of calls and computes them in ONNX.

    Args:
        graph: For concrete shapes; from one with symbolic shapes.
    """

    def __init__(self, graph: Graph):
        self._sizes = {n.name: sizes_of(n) for n in (*graph.placeholders, *graph.calls)}
        self._arguments = {n.name: _sizes_in((n.args, n.kwargs)) for n in graph.calls}
        self._places: dict[sympy.Expr, fx.Node] = {}
        self._symbols = {
            size.expression: (node.name, dim)
            for i, node in reversed(list(enumerate(graph.placeholders)))
            if isinstance(node.meta["val"], Tensor) and i not in set(graph.weights)
            for dim, size in enumerate(node.meta.get(SIZES) or ())
            if isinstance(size, SizeWithExpression)
        }

    def lift_to_placeholders(self, module: fx.GraphModule) -> None:
        """Replaces symbolic sizes among the arguments of calls by new placeholders.

        Args:
            module: A rewritten copy of the graph's module; it is changed.

        Raises:
            CompileError: The rewriting made a plain number of a symbolic size.
        """
        nodes = {node.name: node for node in module.graph.nodes}
        for name, before in self._arguments.items():
            node = nodes.get(name)
            after = [] if node is None else _sizes_in((node.args, node.kwargs))
            if before and (node is None or after != before):
                raise CompileError(f"{name!r} depends on a size that was constant-folded")
        for node in list(module.graph.nodes):
            if node.op == "call_function" and _sizes_in((node.args, node.kwargs)):
                replace = self._replacing(module.graph)
                node.args = _map_sizes(node.args, replace)
                node.kwargs = _map_sizes(node.kwargs, replace)

    def _replacing(self, graph: fx.Graph) -> Callable[[SizeWithExpression], fx.Node]:
        def replace(size: SizeWithExpression) -> fx.Node:
            if size.expression not in self._places:
                first = next(iter(graph.nodes))
                with graph.inserting_before(first):
                    node = graph.placeholder(f"size_{len(self._places)}")
                node.meta["val"] = int(size)
                self._places[size.expression] = node
            return self._places[size.expression]

        return replace

    def emit_sizes(self, model: ir.Model, values: dict[str, Any]) -> None:
        """Adds ONNX nodes that compute each lifted size; enters their results in `values`.

        Args:
            model: Has all inputs and no nodes yet.
            values: ONNX values by node name.

        Raises:
            CompileError: A size does not follow from the shapes of inputs.
        """
        writer = _Writer(model, {s: (values[n], dim) for s, (n, dim) in self._symbols.items()})
        for expression, node in self._places.items():
            values[node.name] = writer(expression)

    def shape(self, name: str, rank: int) -> ir.Shape:
        """Returns the ONNX shape of a node's value: numbers, symbols' names, or None each.

        Args:
            name: Of the node.
            rank: Of the value, for nodes that the graph does not have.
        """
        sizes = self._sizes.get(name, ())
        if len(sizes) != rank:
            sizes = (None,) * rank
        return ir.Shape(
            [str(s.expression) if isinstance(s, SizeWithExpression) else s for s in sizes]
        )


class _Writer:
    """Writes expressions over sizes as ONNX nodes on integer scalars."""

    def __init__(self, model: ir.Model, symbols: dict[sympy.Expr, tuple[ir.Value, int]]):
        self._model = model
        self._symbols = symbols
        self._known: dict[sympy.Expr, ir.Value] = {}

    def __call__(self, expression: sympy.Expr) -> ir.Value:
        if expression not in self._known:
            self._known[expression] = self._write(expression)
        return self._known[expression]

    def _write(self, expression: sympy.Expr) -> ir.Value:
        if expression in self._symbols:
            value, dim = self._symbols[expression]
            return self._node("Gather", [self._node("Shape", [value]), self._constant(dim)])
        if expression.is_Integer:
            return self._constant(int(expression))
        if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
            return self._folded("Mul", [self(expression.base)] * int(expression.exp))
        op = _OPERATORS.get(type(expression).__name__)
        if op is None:
            raise CompileError(f"the size {expression} does not follow from the inputs' shapes")
        return self._folded(op, [self(each) for each in expression.args])

    def _folded(self, op: str, values: Sequence[ir.Value]) -> ir.Value:
        return functools.reduce(lambda a, b: self._node(op, [a, b]), values)

    def _constant(self, number: int) -> ir.Value:
        return self._node("Constant", [], {"value_int": number})

    def _node(
        self, op: str, inputs: Sequence[ir.Value], attributes: dict[str, Any] | None = None
    ) -> ir.Value:
        node = ir.node(op, inputs, attributes or {})
        self._model.graph.append(node)
        result = node.outputs[0]
        result.dtype = ir.DataType.INT64
        rank = 1 if op == "Shape" else 0
        result.shape = ir.Shape([len(inputs[0].shape or ())] if rank else [])
        return result


# Sizes are not negative, so that division that rounds to zero is division that rounds down.
_OPERATORS = {
    "Add": "Add",
    "Mul": "Mul",
    "Max": "Max",
    "Min": "Min",
    "FloorDiv": "Div",
    "CleanDiv": "Div",
    "Mod": "Mod",
    "PythonMod": "Mod",
}


def _sizes_in(arguments: Any) -> list[sympy.Expr]:
    """Returns the sympy expressions of the symbolic sizes among arguments, in order."""
    return [size.expression for size in collect_varying_sizes(arguments)]


def _map_sizes(arguments: Any, replace: Callable[[SizeWithExpression], fx.Node]) -> Any:
    return fx.node.map_aggregate(
        arguments, lambda a: replace(a) if isinstance(a, SizeWithExpression) else a
    )


aten = torch.ops.aten


def index_put_to_scatter(module: fx.GraphModule) -> None:
    """Replaces `index_put` along one dimension by `scatter`, in a graph of known sizes."""
    for node in module.graph.find_nodes(op="call_function", target=aten.index_put.default):
        dim = _dimension(node)
        if dim is not None:
            _replace(module.graph, node, dim)


def _dimension(node: fx.Node) -> int | None:
    """Returns the dimension, not the first, whose rows an `index_put` sets; else None."""
    arguments: Any = node.args
    self, indices, rows, *accumulate = arguments
    found = [d for d, index in enumerate(indices) if index is not None]
    if len(found) != 1 or not found[0] or any(accumulate) or node.kwargs:
        return None
    (dim,) = found
    index = indices[dim].meta["val"]
    whole = list(self.meta["val"].shape)
    whole[dim : dim + 1] = index.shape
    is_whole = list(rows.meta["val"].shape) == whole
    return dim if is_whole and index.ndim == 1 and index.dtype == torch.int64 else None


def _replace(graph: fx.Graph, node: fx.Node, dim: int) -> None:
    arguments: Any = node.args
    self, indices, rows, *_ = arguments
    shape = list(rows.meta["val"].shape)
    behind = [-1, *[1] * (len(shape) - dim - 1)]
    with graph.inserting_before(node):
        index = _call(graph, node, aten.view.default, indices[dim], behind)
        index = _call(graph, node, aten.expand.default, index, shape)
        result = _call(graph, node, aten.scatter.src, self, dim, index, rows)
    result.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _call(graph: fx.Graph, of: fx.Node, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = of.meta["val"].fake_mode if hasattr(of.meta["val"], "fake_mode") else FakeTensorMode()
    with mode:
        node.meta["val"] = target(*values)
    node.meta[ORIGIN] = get_origin_name(of)
    return node
