"""Which sizes of a lowered graph vary: those that are others when its symbols are."""

from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import input_storage
from dynamo_backends.graph.sizes import Size, sizes_of
from dynamo_backends.graph.symbols import symbol_values
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.logs import silenced

_TIMES = 3  # odd, so that what has to be even, or a multiple, stays so


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
    """Other values of what `symbol_values` knows."""
    now = symbol_values(graph.placeholders)
    return {expression: sympy.Integer(value * _TIMES) for expression, value in now.items()}


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
