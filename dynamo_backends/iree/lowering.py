"""ATen graphs to programs of the torch dialect.

What happens to a graph, in order: torch's type promotion becomes casts; calls whose lowering is
inexact are spelled in other words; indices are kept within their dimension; inputs that would be
written to are copied; inputs and outputs that torch stores in another order than row-major are
permuted inside the graph; weights of floating-point types become parameters of the program; the
importer translates the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FreshSymbols
from dynamo_backends.graph.elsewhere import elsewhere
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.legalize import promoted, store
from dynamo_backends.graph.sizes import Size, opened, sizes_in
from dynamo_backends.interface.errors import CompileError, LoweringError, first_line
from dynamo_backends.iree.dtypes import PARAMETERS
from dynamo_backends.iree.importer import Function, translate
from dynamo_backends.iree.in_place import copy_inputs
from dynamo_backends.iree.indices import keep_within, require_fixed
from dynamo_backends.iree.legalize import spell
from dynamo_backends.runtime.ranged import require_elements

ENTRY = "main"


@dataclass(frozen=True)
class IreeInputMap:
    """Which inputs of a graph go where; the others are not read.

    Attributes:
        arguments: Positions of the inputs that are arguments of the function, in its order.
        parameters: Positions of the inputs that are parameters of the program, with their names.
    """

    arguments: tuple[int, ...]
    parameters: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class LoweredIree:
    """A graph as a function of a program."""

    function: Function
    wiring: IreeInputMap


def lower(graph: Graph, name: str = ENTRY, ranged: bool = False) -> LoweredIree:
    """Prepares a graph for the importer.

    Args:
        graph: In normal form, for concrete shapes. It is not changed.
        name: Of the function.
        ranged: The function is for all sizes that the symbols allow; those among arguments are
            further arguments of it (see `graph.sizes.opened`).

    Returns:
        A function whose arguments and results have their dimensions in the order in which torch
        stores them (see `graph.legalize.store`).

    Raises:
        LoweringError: A call cannot be spelled.
        CompileError: A graph cannot be lowered for a range.
    """
    if ranged:
        require_elements(graph)
        graph = opened(graph)[0]
    module = promoted(graph)
    spell(module.graph)
    keep_within(module.graph)
    copy_inputs(module.graph)
    store(module.graph, graph)
    others = elsewhere(graph, module.graph) if ranged else {}
    if ranged:
        require_fixed(module.graph, others)
    arguments, parameters = [], []
    places = [n for n in module.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(places):
        if not node.users or not (ranged or isinstance(node.meta["val"], Tensor)):
            module.graph.erase_node(node)
        elif graph.inputs[i].frozen and _is_worth_preparing(node.meta["val"]):
            parameters.append((i, str(node.name)))
        else:
            arguments.append(i)
    _tidy(module.graph, others)
    function = Function(name, module.graph, tuple(name for _, name in parameters))
    return LoweredIree(function, IreeInputMap(tuple(arguments), tuple(parameters)))


def to_mlir(graph: Graph, lowered: LoweredIree) -> bytes:
    """The program of one graph, as MLIR bytecode.

    Raises:
        LoweringError: The importer does not know the graph's only call.
        CompileError: The importer cannot translate the graph.
    """
    try:
        return translate([lowered.function])
    except Exception as error:
        reason = refusal(error)
        if len(graph.calls) == 1:
            (call,) = graph.calls
            raise LoweringError(call.name, str(call.target), reason) from error
        raise CompileError(reason) from error


def refusal(error: Exception) -> str:
    """What an exception of the importer says, in one line."""
    return f"IREE's importer cannot translate it: {first_line(error)}"


def _is_worth_preparing(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and value.dtype in PARAMETERS
    return is_tensor and value.ndim > 0 and value.numel() > 0


def _tidy(graph: fx.Graph, others: Mapping[fx.Node, Any]) -> None:
    """Leaves of nodes' `meta` what the importer is to read.

    Args:
        graph: The graph.
        others: Values at other sizes (see `graph.elsewhere`), of what is for a range.
    """
    symbol = sympy.Symbol("any")
    symbols = FreshSymbols({symbol: 2})
    unknown = symbols.size(symbol)

    def open_up(value: Any, other: Any) -> Any:
        if not isinstance(value, Tensor):
            return _plain(value)
        pairs = list(zip(value.shape, other.shape, strict=True))
        if all(n == m for n, m in pairs):
            return value
        with symbols.mode:
            shape = [n if n == m else unknown for n, m in pairs]
            return torch.empty(shape, dtype=value.dtype)

    for node in graph.nodes:
        value = node.meta.get("val")
        other = others.get(node, value)
        if isinstance(value, list | tuple):
            value = [open_up(*pair) for pair in zip(value, other, strict=True)]
        else:
            value = open_up(value, other)
        node.meta = {"val": value}
        if sizes_in((node.args, node.kwargs)):
            node.args = fx.node.map_aggregate(node.args, _plain)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _plain)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, Size) else value
