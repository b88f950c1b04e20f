"""Which sizes of a lowered graph vary: those that are others when its symbols are."""

from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import input_storage
from dynamo_backends.graph.sizes import Size, sizes_of
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.logs import silenced

_TIMES = 3  # odd, so that what has to be even, or a multiple, stays so
_FARTHEST = 4  # times a size, a symbol that it is made of is looked for


def elsewhere(graph: Graph, lowered: fx.Graph) -> dict[fx.Node, Any]:
    """What the nodes of a lowered graph are where every symbol is three times as large.

    Args:
        graph: From `graph.sizes.opened`.
        lowered: From `graph.legalize`; it has all placeholders of `graph`.

    Raises:
        CompileError: It is another graph there, or a size is not known.
    """
    known = _varied(graph)
    places = lowered.find_nodes(op="placeholder")
    mode, values = FakeTensorMode(), {}
    with mode, silenced("torch._subclasses"):
        for place, source in zip(places, graph.placeholders, strict=True):
            values[place] = _placed(source, known)
        for node in lowered.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    values[node] = node.target(*args, **kwargs)
                except Exception as error:
                    reason = f"{node.target} cannot be of other sizes: {error}"
                    raise CompileError(reason) from error
    return values


def _varied(graph: Graph) -> dict[sympy.Expr, sympy.Integer]:
    """Other values of the symbols; of expressions where no symbol's value follows from them."""
    sizes = [
        size
        for place in graph.placeholders
        for size in (place.meta["val"], *sizes_of(place))
        if isinstance(size, Size)
    ]
    now: dict[sympy.Expr, sympy.Integer] = {}
    for size in sorted(sizes, key=lambda size: len(size.expression.free_symbols)):
        unknown = list(size.expression.free_symbols - now.keys())
        value = _solved(size, unknown[0], now) if len(unknown) == 1 else None
        if value is not None:
            now[unknown[0]] = value
        elif unknown:
            now[size.expression] = sympy.Integer(size)
    return {expression: value * _TIMES for expression, value in now.items()}


def _solved(
    size: Size, symbol: sympy.Symbol, now: dict[sympy.Expr, sympy.Integer]
) -> sympy.Integer | None:
    """The smallest value of a symbol with which a size is what it is."""
    expression = size.expression.xreplace(now)
    if expression == symbol:
        return sympy.Integer(size)
    tried = map(sympy.Integer, range(1, _FARTHEST * (size + 4)))
    return next((n for n in tried if expression.xreplace({symbol: n}) == size), None)


def _placed(place: fx.Node, known: dict[sympy.Expr, sympy.Integer]) -> Any:
    value = place.meta["val"]
    if isinstance(value, Size):
        return _valued(value, known)
    if not isinstance(value, Tensor):
        return value
    sizes: list[Any] = list(sizes_of(place))
    if None in sizes:
        raise CompileError(f"the sizes of the input {place.name!r} are not known")
    shape = [_valued(sizes[d], known) for d in input_storage(value).order]
    return torch.empty(shape, dtype=value.dtype, device=value.device)


def _valued(size: int, known: dict[sympy.Expr, sympy.Integer]) -> int:
    if not isinstance(size, Size):
        return size
    number = known.get(size.expression, size.expression.xreplace(known))
    if number.free_symbols:
        raise CompileError(f"the size {size.expression} does not follow from inputs' shapes")
    return int(number)
