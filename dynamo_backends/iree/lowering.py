"""ATen graphs to programs of the torch dialect.

What happens to a graph, in order: torch's type promotion becomes casts; calls whose lowering is
inexact are spelled in other words; indices are kept within their dimension; inputs that would be
written to are copied; inputs and outputs that torch stores in another order than row-major are
permuted inside the graph; weights of floating-point types become parameters of the program; the
importer translates the rest.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FreshSymbols, OpOverload
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.legalize import copy_with_promotion_casts, insert_layout_permutes
from dynamo_backends.graph.shape_propagation import ShapeInference
from dynamo_backends.graph.symbolic_scalars import require_no_hardcoded_sizes
from dynamo_backends.graph.symbolic_sizes import (
    SizeWithExpression,
    collect_varying_sizes,
    with_sizes_as_inputs,
)
from dynamo_backends.graph.symbols import evaluate_at_other_sizes
from dynamo_backends.interface.errors import CompileError, LoweringError, first_line
from dynamo_backends.iree.importer import PARAMETERS, Function, translate
from dynamo_backends.iree.indices import clamp_indices, require_fixed
from dynamo_backends.iree.legalize import legalize_calls
from dynamo_backends.runtime.ranged_calls import require_nonempty

aten = torch.ops.aten

_OPERATORS = frozenset(
    {
        aten.index_add.default, aten.index_put.default, aten.scatter.reduce, aten.scatter.src,
        aten.scatter.value, aten.scatter.value_reduce, aten.scatter_add.default,
        aten.scatter_reduce.two, aten.sort.default, aten.topk.default,
    }
)  # fmt: skip

_NO_CALCULATIONS = frozenset(
    {aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default}
)


# IREE computes these operators in the memory of their first operand. With IREE 3.13 that is the
# caller's memory, if the operand is an input of the program. So they get a copy of it: a
# computation that gives the same numbers, which the compiler does not leave out.
def copy_inputs(graph: fx.Graph) -> None:
    """Puts copies of inputs before operators that would write to them, in place."""
    infer = ShapeInference()
    for node in list(graph.nodes):
        source: Any = node.args[0] if node.target in _OPERATORS else None
        if source is not None and _is_input(source):
            with graph.inserting_before(node):
                node.update_arg(0, _copy(graph, source, infer))


def _is_input(node: fx.Node) -> bool:
    """Returns whether a tensor may be an input of the program, or a part of one."""
    while node.op == "call_function" and (_is_view(node.target) or node.target in _NO_CALCULATIONS):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _is_view(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return any(result.alias_info is not None for result in target._schema.returns)


def _copy(graph: fx.Graph, source: fx.Node, infer: ShapeInference) -> fx.Node:
    """Returns the same numbers; of booleans and complex numbers no copy is known."""
    call = functools.partial(infer.insert_call, graph)
    dtype = source.meta["val"].dtype
    if dtype.is_floating_point:
        nan = call(aten.ne.Tensor, source, source)
        return call(aten.masked_fill.Scalar, source, nan, math.nan)
    if dtype.is_complex or dtype == torch.bool:
        return source
    odd = call(aten.bitwise_and.Scalar, source, 1)
    even = call(aten.bitwise_and.Scalar, source, 254 if dtype == torch.uint8 else -2)
    return call(aten.bitwise_or.Tensor, odd, even)


ENTRY = "main"


@dataclass(frozen=True)
class IreeInputMap:
    """The positions at which a graph's inputs enter; the others are not read.

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
        name: Name of the function.
        ranged: The function is for all sizes that the symbols allow; those among arguments are
            further arguments of it (see `graph.sizes.with_sizes_as_inputs`).

    Returns:
        A function whose arguments and results have their dimensions in the order in which torch
        stores them (see `graph.legalize.insert_layout_permutes`).

    Raises:
        LoweringError: A call cannot be spelled.
        CompileError: A graph cannot be lowered for a range.
    """
    if ranged:
        require_nonempty(graph)
        graph = with_sizes_as_inputs(graph)[0]
    module = copy_with_promotion_casts(graph)
    legalize_calls(module.graph)
    if ranged:
        require_no_hardcoded_sizes(module.graph, graph.module.graph)
    clamp_indices(module.graph)
    copy_inputs(module.graph)
    insert_layout_permutes(module.graph, graph)
    others = evaluate_at_other_sizes(graph, module.graph) if ranged else {}
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
    """Returns the program of one graph, as MLIR bytecode.

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
    """Returns what an exception of the importer says, in one line."""
    return f"IREE's importer cannot translate it: {first_line(error)}"


def _is_worth_preparing(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and value.dtype in PARAMETERS
    return is_tensor and value.ndim > 0 and value.numel() > 0


def _tidy(graph: fx.Graph, others: Mapping[fx.Node, Any]) -> None:
    """Leaves of nodes' `meta` what the importer is to read.

    Args:
        graph: The graph.
        others: Values at other sizes (see `graph.symbols.evaluate_at_other_sizes`), of what is for
            a range.
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
        if collect_varying_sizes((node.args, node.kwargs)):
            node.args = fx.node.map_aggregate(node.args, _plain)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _plain)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, SizeWithExpression) else value
