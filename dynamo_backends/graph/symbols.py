"""Solves for a graph's symbols, guards equal sizes, and tries other sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import infer_input_layout
from dynamo_backends.graph.symbolic_sizes import SizeWithExpression, sizes_of
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.logs import silence_loggers

_FARTHEST = 4  # times a size, a symbol that it is made of is looked for


def solve_symbol_values(places: Sequence[fx.Node]) -> dict[sympy.Expr, int]:
    """Solves for the symbols' values from the concrete sizes of placeholders.

    Args:
        places: Placeholders of a graph for concrete shapes; from one with symbolic shapes.
    """
    now: dict[sympy.Expr, sympy.Integer] = {}
    for size in sorted(_sizes(places), key=lambda size: len(size.expression.free_symbols)):
        unknown = list(size.expression.free_symbols - now.keys())
        value = _solved(size, unknown[0], now) if len(unknown) == 1 else None
        if value is not None:
            now[unknown[0]] = value
        elif unknown:
            now[size.expression] = sympy.Integer(size)
    return {expression: int(value) for expression, value in now.items()}


def symbol_ranges(places: Sequence[fx.Node]) -> dict[sympy.Expr, tuple[int, int | None]]:
    """Maps each size expression of a placeholder to its (lower, upper) bounds.

    Args:
        places: As for `solve_symbol_values`.
    """
    return {size.expression: (size.lower, size.upper) for size in _sizes(places)}


def _sizes(places: Sequence[fx.Node]) -> list[SizeWithExpression]:
    values = (v for place in places for v in (place.meta["val"], *sizes_of(place)))
    return [v for v in values if isinstance(v, SizeWithExpression)]


def _solved(
    size: SizeWithExpression, symbol: sympy.Symbol, now: dict[sympy.Expr, sympy.Integer]
) -> sympy.Integer | None:
    """The smallest value of a symbol with which a size is what it is."""
    expression = size.expression.xreplace(now)
    if expression == symbol:
        return sympy.Integer(size)
    tried = map(sympy.Integer, range(1, _FARTHEST * (size + 4)))
    return next((n for n in tried if expression.xreplace({symbol: n}) == size), None)


aten = torch.ops.aten

_KEYS_AND_VALUES = (((1, 0), (2, 0)), ((1, 2), (2, 2)))
"""Batch and length: a position among the arguments, and a dimension, of both."""

EQUAL: Mapping[Any, Sequence[tuple[tuple[int, int], tuple[int, int]]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _KEYS_AND_VALUES,
    aten._scaled_dot_product_flash_attention.default: _KEYS_AND_VALUES,
    aten._scaled_dot_product_efficient_attention.default: _KEYS_AND_VALUES,
}


def guard_equal_sizes(graph: fx.Graph) -> None:
    """Guards that sizes which attention needs equal are equal, while Dynamo traces.

    Dynamo guards that they are in each call; others are captured anew, and refused as in eager.

    Args:
        graph: Just traced by AOT Autograd: symbols know their values in the call.
    """
    for node in graph.nodes:
        for (a, i), (b, j) in EQUAL.get(node.target, ()):
            first, second = _value(node, a), _value(node, b)
            if first is not None and second is not None:
                _unite(first.shape[i], second.shape[j])


def _value(node: fx.Node, place: int) -> Tensor | None:
    source = node.args[place] if place < len(node.args) else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return value if isinstance(value, Tensor) and value.ndim == 4 else None


def _unite(first: int | torch.SymInt, second: int | torch.SymInt) -> None:
    symbolic = [n for n in (first, second) if isinstance(n, torch.SymInt)]
    if symbolic and all(n.node.has_hint() for n in symbolic):
        bool(first == second)  # which torch guards, and learns from


_TIMES = 3  # odd, so that what has to be even, or a multiple, stays so


def evaluate_at_other_sizes(graph: Graph, lowered: fx.Graph) -> dict[fx.Node, Any]:
    """Runs a lowered graph on fake tensors of other sizes; returns each node's value.

    Args:
        graph: From `graph.sizes.with_sizes_as_inputs`.
        lowered: From `graph.legalize`; it has all placeholders of `graph`.

    Raises:
        CompileError: It is another graph there, or a size is not known.
    """
    known = _varied(graph)
    places = lowered.find_nodes(op="placeholder")
    mode, values = FakeTensorMode(), {}
    with mode, silence_loggers("torch._subclasses"):
        for place, source in zip(places, graph.placeholders, strict=True):
            values[place] = _placed(source, known)
        for node in lowered.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    values[node] = node.target(*args, **kwargs)
                except Exception as error:
                    reason = f"{node.target} cannot run with other sizes: {error}"
                    raise CompileError(reason) from error
    return values


def _varied(graph: Graph) -> dict[sympy.Expr, sympy.Integer]:
    """Other values of what `solve_symbol_values` knows."""
    now = solve_symbol_values(graph.placeholders)
    return {expression: sympy.Integer(value * _TIMES) for expression, value in now.items()}


def _placed(place: fx.Node, known: dict[sympy.Expr, sympy.Integer]) -> Any:
    value = place.meta["val"]
    if isinstance(value, SizeWithExpression):
        return _valued(value, known)
    if not isinstance(value, Tensor):
        return value
    sizes: list[Any] = list(sizes_of(place))
    if None in sizes:
        raise CompileError(f"the sizes of the input {place.name!r} are not known")
    shape = [_valued(sizes[d], known) for d in infer_input_layout(value).order]
    return torch.empty(shape, dtype=value.dtype, device=value.device)


def _valued(size: int, known: dict[sympy.Expr, sympy.Integer]) -> int:
    if not isinstance(size, SizeWithExpression):
        return size
    number = known.get(size.expression, size.expression.xreplace(known))
    if number.free_symbols:
        raise CompileError(f"the size {size.expression} does not follow from inputs' shapes")
    return int(number)
