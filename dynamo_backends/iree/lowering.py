"""ATen graphs to programs of the torch dialect.

What happens to a graph, in order: torch's type promotion becomes casts; calls whose lowering is
inexact are spelled in other words; indices are kept within their dimension; inputs and outputs that
torch stores in another order than row-major are permuted inside the graph; weights of
floating-point types become parameters of the program; the importer translates the rest.
"""

from dataclasses import dataclass

from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.legalize import promoted, store
from dynamo_backends.interface.errors import CompileError, LoweringError, first_line
from dynamo_backends.iree.dtypes import PARAMETERS
from dynamo_backends.iree.importer import Function, translate
from dynamo_backends.iree.indices import keep_within
from dynamo_backends.iree.legalize import spell

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


def lower(graph: Graph, name: str = ENTRY) -> LoweredIree:
    """Prepares a graph with static shapes for the importer.

    Args:
        graph: In normal form. It is not changed.
        name: Of the function.

    Returns:
        A function whose arguments and results have their dimensions in the order in which torch
        stores them (see `graph.legalize.store`).

    Raises:
        LoweringError: A call cannot be spelled.
    """
    module = promoted(graph)
    spell(module.graph)
    keep_within(module.graph)
    store(module.graph, graph)
    arguments, parameters = [], []
    places = [n for n in module.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(places):
        if not node.users or not isinstance(node.meta["val"], Tensor):
            module.graph.erase_node(node)
        elif graph.inputs[i].frozen and _is_worth_preparing(node.meta["val"]):
            parameters.append((i, str(node.name)))
        else:
            arguments.append(i)
    _tidy(module.graph)
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


def _is_worth_preparing(value: Tensor) -> bool:
    return value.dtype in PARAMETERS and value.ndim > 0 and value.numel() > 0


def _tidy(graph: fx.Graph) -> None:
    """Leaves of nodes' `meta` what the importer is to read."""
    for node in graph.nodes:
        value = node.meta.get("val")
        node.meta = {"val": list(value) if isinstance(value, tuple) else value}
