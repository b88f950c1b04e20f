"""ATen graphs for a range of sizes to Relax: sizes that vary are expressions over variables."""

import functools
import operator
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import infer_input_layout
from dynamo_backends.graph.legalize import copy_with_promotion_casts, insert_layout_permutes
from dynamo_backends.graph.symbolic_sizes import (
    SIZE_FUNCTIONS,
    SizeWithExpression,
    sizes_of,
    with_sizes_as_inputs,
)
from dynamo_backends.graph.symbols import evaluate_at_other_sizes
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.runtime.ranged_calls import require_nonempty
from dynamo_backends.tvm.converters import Importer
from dynamo_backends.tvm.lowering import LoweredRelax, build_module
from dynamo_backends.tvm.vendor import tvm


def lower_ranged(graph: Graph) -> LoweredRelax:
    """Lowers a graph (see `lowering.lower`), for all sizes that its symbols allow.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: It cannot be lowered for a range.
    """
    require_nonempty(graph)
    wide = with_sizes_as_inputs(graph)[0]
    module = copy_with_promotion_casts(wide)
    insert_layout_permutes(module.graph, wide)
    others = evaluate_at_other_sizes(wide, module.graph)
    places = module.graph.find_nodes(op="placeholder")
    variables = _Variables(wide)
    shapes = {}
    for place, source in zip(places, wide.placeholders, strict=True):
        value = source.meta["val"]
        if isinstance(value, Tensor):
            sizes: list[Any] = list(sizes_of(source))
            shapes[place] = [variables(sizes[d]) for d in infer_input_layout(value).order]
        elif isinstance(value, SizeWithExpression):
            _put_in(place, variables(value))
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        shapes[node] = [variables(size) for size in sizes_of(node)]
    used = [bool(n.users) and isinstance(n.meta["val"], Tensor) for n in places]
    return build_module(
        graph,
        module.graph,
        tuple(i for i in graph.activations if used[i]),
        tuple(i for i in graph.weights if used[i]),
        Importer(others, shapes),
    )


def _put_in(place: fx.Node, number: Any) -> None:
    """Puts a number in the place of a size among the arguments of calls."""
    for user in list(place.users):
        replace = lambda a: number if a is place else a  # noqa: E731
        user.args, user.kwargs = _mapped(user.args, replace), _mapped(user.kwargs, replace)


def _mapped(arguments: Any, replace: Any) -> Any:
    return fx.node.map_aggregate(arguments, replace)


class _Variables:
    """TVM's variables for what can be read off the inputs of a graph."""

    def __init__(self, graph: Graph):
        sizes = [
            size
            for i in graph.activations
            for size in sizes_of(graph.placeholders[i])
            if isinstance(size, SizeWithExpression)
        ]
        self._known: dict[sympy.Expr, Any] = {}
        for size in sorted(sizes, key=lambda size: not size.expression.is_Symbol):
            if not size.expression.free_symbols <= self._known.keys():
                self._known[size.expression] = tvm.tirx.Var(f"n{len(self._known)}", "int64")

    def __call__(self, size: Any) -> Any:
        """Returns a size as an expression; a plain number as it is."""
        if not isinstance(size, SizeWithExpression):
            return size
        return self._write(size.expression)

    def _write(self, expression: sympy.Expr) -> Any:
        if expression in self._known:
            return self._known[expression]
        if expression.is_Integer:
            return int(expression)
        if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
            factors = [self._write(expression.base)] * int(expression.exp)
            return functools.reduce(operator.mul, factors)
        parts = [self._write(part) for part in expression.args]
        if expression.is_Add or expression.is_Mul:
            return functools.reduce(operator.add if expression.is_Add else operator.mul, parts)
        compute = SIZE_FUNCTIONS.get(type(expression).__name__)
        if compute is None:
            raise CompileError(f"the size {expression} does not follow from inputs' shapes")
        return compute(*parts)
