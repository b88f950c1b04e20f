"""Turns a graph with symbolic shapes into one for concrete shapes."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dynamo_backends._torch_private import size_bounds
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import empty_strided_like
from dynamo_backends.graph.pass_sequence import PassSequence
from dynamo_backends.graph.properties import NORMAL_FORM, Pass, Property
from dynamo_backends.graph.shape_propagation import find_data_dependent_calls
from dynamo_backends.graph.symbolic_scalars import lower_symbolic_scalars, note_hardcoded_size
from dynamo_backends.graph.symbolic_sizes import Symbolic, SymbolicEvaluator, is_symbolic

SPECIALIZE = "specialize"


def is_dynamic(graph: Graph) -> bool:
    """Returns whether any value of the graph has a symbolic size."""
    return any(is_symbolic(n.meta.get("val")) for n in graph.placeholders)


def computes_with_sizes(graph: Graph) -> bool:
    """Returns whether any call on tensors depends on a symbolic size or number.

    Else one program serves all that vary: numbers that are returned as they are or counted up, such
    as the length of a cache that is kept beside it.
    """
    return any(_has_symbolic_sizes(n) for n in (*graph.placeholders, *graph.calls)) or any(
        isinstance(source.meta.get("val"), Symbolic)
        for node in graph.calls
        if not isinstance(node.meta.get("val"), Symbolic)
        for source in node.all_input_nodes
    )


def _has_symbolic_sizes(node: fx.Node) -> bool:
    return any(map(is_symbolic, _tensors(node)))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def shape_key(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the hashable shapes and numbers of a call: the key of static executables."""
    return tuple(a.shape if isinstance(a, torch.Tensor) else a for a in args)


def make_example_inputs(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """Replaces tensors by empty ones on "meta", except frozen weights, for later compiling.

    Args:
        graph: Whose frozen weights are kept; other tensors keep their sizes and strides only.
        args: One value per placeholder.
    """
    weights = frozenset(graph.weights)
    return [
        empty_strided_like(a, "meta") if isinstance(a, torch.Tensor) and i not in weights else a
        for i, a in enumerate(args)
    ]


def specialize(graph: Graph, args: Sequence[Any], remember: bool = False) -> Graph:
    """Copies a graph with the concrete sizes of one call's arguments.

    Symbolic integers become Python integers, and `meta["val"]` tensors get concrete sizes. The
    placeholders stay as they are, so that the calling convention does not change. The fake tensors
    of the copy belong to a new `FakeTensorMode`: a mode serves one thread at a time, and that of
    the capture is used again when the backward graph is compiled.

    Args:
        graph: A graph with symbolic shapes.
        args: One value per placeholder: tensors, and integers for symbols.
        remember: Sizes know the symbolic expressions that they come from (see `sizes`).
    """
    result = graph.copy()
    PassSequence((make_specialize_pass(args, remember),), NORMAL_FORM)(result)
    return result


def make_specialize_pass(args: Sequence[Any], remember: bool = False) -> Pass:
    """Makes the pass that replaces symbolic sizes by those of one call.

    Args:
        args: One value per placeholder: tensors, and integers for symbols.
        remember: As for `specialize`.
    """
    return Pass(
        name=SPECIALIZE,
        summary="symbolic sizes are replaced by the integers of one call",
        requires=NORMAL_FORM,
        ensures=frozenset({Property.STATIC}),
        run=functools.partial(_specialize, args=args, remember=remember),
    )


def _specialize(graph: Graph, args: Sequence[Any], remember: bool) -> bool:
    if not is_dynamic(graph) and find_data_dependent_calls(graph):
        return False
    bindings: dict[sympy.Expr, Any] = {}
    for place, value in zip(graph.placeholders, args, strict=True):
        _bind(place.meta["val"], value, bindings)
    evaluation = SymbolicEvaluator(bindings)
    for node in [*graph.placeholders, *graph.calls]:
        symbolic = node.meta.get("val")
        value = evaluation(symbolic)
        if remember:
            evaluation.record_expressions(node, symbolic)
        if isinstance(value, int | float | bool) and not isinstance(node.meta["val"], torch.Tensor):
            known: Any = evaluation.evaluate_with_expression(symbolic) if remember else value
            if isinstance(symbolic, torch.SymBool) and node.users:
                note_hardcoded_size(graph.module.graph)
            node.replace_all_uses_with(known)
            if node.op == "call_function":
                graph.module.graph.erase_node(node)
                continue
            value = known
        node.meta["val"] = value
    if remember:
        lower_symbolic_scalars(graph.module.graph)
    return True


def recover_symbol_inputs(graph: Graph, tensors: Sequence[torch.Tensor]) -> list[Any] | None:
    """The values of all placeholders, from those that are tensors.

    Args:
        graph: With symbolic shapes.
        tensors: In order.

    Returns:
        None: the graph is for other tensors, or has numbers that they do not tell.
    """
    symbolic = [place.meta["val"] for place in graph.placeholders]
    expected = [s for s in symbolic if isinstance(s, torch.Tensor)]
    if len(expected) != len(tensors) or not all(map(_is_instance, expected, tensors)):
        return None
    bindings: dict[sympy.Expr, Any] = {}
    for s, value in zip(expected, tensors, strict=True):
        _bind(s, value, bindings)
    left = iter(tensors)
    values = [
        next(left) if isinstance(s, torch.Tensor) else bindings.get(s.node.expr) for s in symbolic
    ]
    return None if any(value is None for value in values) else values


def _is_instance(symbolic: torch.Tensor, value: Any) -> bool:
    """Returns whether a value is a tensor that the guards allow for a symbolic one."""
    if not isinstance(value, torch.Tensor):
        return False
    same = (symbolic.dtype, symbolic.device, symbolic.ndim)
    if same != (value.dtype, value.device, value.ndim):
        return False
    pairs = zip((*symbolic.shape, *symbolic.stride()), (*value.shape, *value.stride()), strict=True)
    return all(_is_within(s, n) for s, n in pairs)


def _is_within(symbolic: Any, number: int) -> bool:
    if not isinstance(symbolic, torch.SymInt):
        return bool(symbolic == number)
    lower, upper = size_bounds(symbolic)
    return lower <= number and (upper is None or number <= upper)


class GraphSymbols:
    """The symbols of a graph: reads their values from calls and specializes for them.

    Args:
        graph: With symbolic shapes.

    Attributes:
        most: The largest value that guards allow of each symbol that sizes of inputs follow from;
            None: there is none.
        numbers: Symbols of numbers that the graph is given and that are in no tensor's size.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self.numbers = frozenset(_numbers(graph))
        self.most: dict[sympy.Symbol, int | None] = {}
        for place in graph.placeholders:
            value = place.meta.get("val")
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            for size in shape:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self.most[size.node.expr] = size_bounds(size)[1]

    def bind_values(self, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """Returns the values of all symbols that one call's arguments imply.

        Args:
            args: One value per placeholder.
        """
        bindings: dict[sympy.Expr, Any] = {}
        for place, value in zip(self._graph.placeholders, args, strict=True):
            _bind(place.meta["val"], value, bindings)
        return bindings

    def specialize(self, args: Sequence[Any]) -> Graph:
        """Copies the graph for one call's sizes, which keep their expressions."""
        return specialize(self._graph, args, remember=True)

    def make_arguments(self, values: Mapping[sympy.Symbol, int]) -> list[Any]:
        """Makes fake arguments of a call in which the symbols have these values.

        Args:
            values: Values of all symbols.
        """
        return list(
            map(SymbolicEvaluator(values), (p.meta["val"] for p in self._graph.placeholders))
        )


def _numbers(graph: Graph) -> set[sympy.Symbol]:
    given = [p.meta.get("val") for p in graph.placeholders]
    symbols = {v.node.expr for v in given if isinstance(v, Symbolic) and v.node.expr.is_Symbol}
    for node in (*graph.placeholders, *graph.calls):
        for value in _tensors(node):
            for size in value.shape:
                if isinstance(size, Symbolic):
                    symbols -= size.node.expr.free_symbols
    return symbols


def _bind(symbolic: Any, value: Any, bindings: dict[sympy.Expr, Any]) -> None:
    if isinstance(symbolic, Symbolic):
        expression = symbolic.node.expr
        if isinstance(expression, sympy.Symbol):
            bindings[expression] = value
    elif isinstance(symbolic, torch.Tensor):
        for s, v in zip(symbolic.shape, value.shape, strict=True):
            _bind(s, v, bindings)
        for s, v in zip(symbolic.stride(), value.stride(), strict=True):
            _bind(s, v, bindings)
