"""Traces a function on fake copies of one call's arguments.

Where sizes of the call may vary it is traced with symbols. So what it makes knows where its sizes
come from, and it is the same for all sizes, or that is found out.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.layouts import empty_strided_like
from dynamo_backends.graph.symbolic_scalars import lower_symbolic_scalars, note_hardcoded_size
from dynamo_backends.graph.symbolic_sizes import (
    SIZE_FUNCTIONS,
    FloatWithExpression,
    SizeWithExpression,
    Symbolic,
    SymbolicEvaluator,
    collect_varying_sizes,
    has_size_expressions,
    sizes_of,
    strides_of,
)
from dynamo_backends.graph.symbols import solve_symbol_values, symbol_ranges
from dynamo_backends.interface.errors import LoweringError, first_line

log = logging.getLogger("dynamo_backends")

Function = Callable[..., Any]
Rules = Mapping[Any, Function]


class _FixedError(Exception):
    """What a function makes of a call is for certain sizes alone."""


class CallTraceCache:
    """Caches traces of a graph's calls: calls of the same kind are traced once.

    The rules are the same for all calls of a function.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, fx.Graph] = {}

    def __call__(self, node: fx.Node, function: Function, rules: Rules) -> fx.Graph:
        """Returns the cached trace of a call (see `trace_call`); callers must not change it."""
        kind = function, _kind(node)
        if kind not in self._found:
            self._found[kind] = trace_call(node, function, rules)
        return self._found[kind]


def _kind(node: fx.Node) -> str:
    """Builds the cache key of a trace: arguments, fake inputs and sizes, but no names."""
    inputs = node.all_input_nodes

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "input", inputs.index(value)
        if isinstance(value, SizeWithExpression | FloatWithExpression):
            return value, value.expression
        return value

    def described(x: fx.Node) -> tuple[Any, ...]:
        value: Tensor = x.meta["val"]
        sizes = [argument(size) for size in (*sizes_of(x), *strides_of(x))]
        return value.dtype, value.device, tuple(value.shape), value.stride(), sizes

    given = fx.node.map_aggregate((node.args, node.kwargs), argument)
    return repr((given, [described(x) for x in inputs], _varies(node)))


def trace_call(node: fx.Node, function: Function, rules: Rules) -> fx.Graph:
    """Traces a function on fake copies of a call's arguments; returns the new FX graph.

    If sizes of the call may vary, and they are not the same calls for all, the call's graph is
    noted to have forgotten sizes (see `graph.numbers`).

    Args:
        node: The call, for concrete shapes.
        function: Takes its arguments.
        rules: Functions of an operator's arguments, by the operator, to decompose in turn.

    Returns:
        A graph with a placeholder for each input of the call. Its nodes' `meta` has their values
        and, if those vary, sizes and strides.

    Raises:
        LoweringError: The function cannot be traced.
    """
    if _varies(node):
        try:
            return _with_symbols(node, function, rules)
        except Exception as error:
            log.info("%s is decomposed for static sizes only: %s", node.target, first_line(error))
            log.debug("tracing with symbols failed", exc_info=True)
            note_hardcoded_size(node.graph)
    try:
        return _with_numbers(node, function, rules)
    except Exception as error:
        reason = f"torch cannot decompose it ({type(error).__name__})"
        raise LoweringError(node.name, str(node.target), reason) from error


def _varies(node: fx.Node) -> bool:
    """Returns whether the sizes of a call may vary and the expressions are known."""
    known = [(sizes_of(n), strides_of(n)) for n in (node, *node.all_input_nodes)]
    return has_size_expressions(node.graph) and bool(
        collect_varying_sizes((known, node.args, node.kwargs))
    )


def _with_numbers(node: fx.Node, function: Function, rules: Rules) -> fx.Graph:
    inputs = node.all_input_nodes

    def call(*tensors: Tensor) -> Any:
        known = dict(zip(inputs, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        return function(*args, **kwargs)

    with private.FakeTensorMode():
        fakes = [empty_strided_like(n.meta["val"]) for n in inputs]
        return private.make_fx(torch.func.functionalize(call), dict(rules))(*fakes).graph


def _with_symbols(node: fx.Node, function: Function, rules: Rules) -> fx.Graph:
    places = node.graph.find_nodes(op="placeholder")
    now, ranges = solve_symbol_values(places), symbol_ranges(places)
    # Values say only where a trace begins; 0 and 1 would be no symbols.
    hints = {expression: max(value, 2) for expression, value in now.items()}
    graph, symbols = _symbolic_trace(node, function, rules, hints)
    for guard in symbols.guards:
        other = _elsewhere(guard, hints, ranges)
        if other is None:
            continue
        there = _symbolic_trace(node, function, rules, other)
        if _told(graph, symbols, other) != _told(*there, other):
            raise _FixedError(f"its trace requires the guard {guard}")
    bindings = {own: now[symbols.to_given_symbols(own)] for own in symbols.values}
    _settle(graph, SymbolicEvaluator(bindings, symbols.to_given_symbols))
    return graph


def _symbolic_trace(
    node: fx.Node, function: Function, rules: Rules, hints: Mapping[sympy.Expr, int]
) -> tuple[fx.Graph, private.FreshSymbols]:
    symbols = private.FreshSymbols(hints, symbol_ranges(node.graph.find_nodes(op="placeholder")))
    inputs = node.all_input_nodes
    sizes = list(
        {s.expression: s for s in collect_varying_sizes((node.args, node.kwargs))}.values()
    )

    def call(*values: Any) -> Any:
        numbers = dict(zip((s.expression for s in sizes), values, strict=False))
        known = dict(zip(inputs, values[len(sizes) :], strict=True))

        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return known[value]
            return numbers[value.expression] if isinstance(value, SizeWithExpression) else value

        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), argument)
        return function(*args, **kwargs)

    numbers = [symbols.size(s.expression) for s in sizes]
    tensors = [_symbolic(n, symbols) for n in inputs]
    with symbols.mode:
        trace = private.make_fx(torch.func.functionalize(call), dict(rules))
        return trace(*numbers, *tensors).graph, symbols


_TRIED = (*range(2, 1025), *(1 << i for i in range(11, 32)), *((1 << i) + 1 for i in range(11, 32)))
"""Sizes at which what a trace assumed may be false, besides those near its own numbers."""


def _elsewhere(
    guard: sympy.Basic,
    hints: Mapping[sympy.Expr, int],
    ranges: Mapping[sympy.Expr, tuple[int, int | None]],
) -> dict[sympy.Expr, int] | None:
    """Other values of symbols, for which an assumption is false; None: none are found.

    Raises:
        NameError: It is over functions that are not known.
    """
    symbols = sorted(guard.free_symbols, key=str)
    holds = sympy.lambdify(symbols, guard, modules=[dict(SIZE_FUNCTIONS)])
    numbers = [int(n) for n in guard.atoms(sympy.Integer)]
    for symbol in symbols:
        lower, upper = ranges.get(symbol, (0, None))
        bases = (hints.get(symbol, 2), *numbers)
        for value in (*(n + i for n in bases for i in (1, -1, 0)), *_TRIED):
            if value < max(lower, 2) or (upper is not None and value > upper):
                continue
            other = {**hints, symbol: value}
            if not holds(*(other[s] for s in symbols)):
                return other
    return None


def _told(
    graph: fx.Graph, symbols: private.FreshSymbols, values: Mapping[sympy.Expr, int]
) -> list[str]:
    """The calls of a trace, with the sizes of their results for values of symbols."""

    def shape(value: Any) -> str:
        if isinstance(value, Symbolic):
            return str(symbols.to_given_symbols(value.node.expr).subs(values))
        if isinstance(value, Tensor):
            return str([shape(n) for n in value.shape])
        return str([shape(x) for x in value]) if isinstance(value, list | tuple) else str(value)

    return [
        f"{node.format_node()} {'' if node.op == 'output' else shape(node.meta.get('val'))}"
        for node in graph.nodes
    ]


def _symbolic(node: fx.Node, symbols: private.FreshSymbols) -> Tensor:
    value: Tensor = node.meta["val"]

    def known(sizes: Any, concrete: Any) -> list[Any]:
        pairs = zip(sizes, concrete, strict=True)
        return [
            symbols.size(s.expression) if isinstance(s, SizeWithExpression) else n for s, n in pairs
        ]

    sizes, strides = known(sizes_of(node), value.shape), strides_of(node)
    if None not in strides:
        return symbols.tensor(sizes, known(strides, value.stride()), value)
    order = sorted(range(value.ndim), key=lambda d: (-value.stride()[d], d))
    with symbols.mode:
        return torch.empty_permuted(sizes, order, dtype=value.dtype, device=value.device)


def _settle(graph: fx.Graph, evaluation: SymbolicEvaluator) -> None:
    """Makes a graph one for concrete shapes whose sizes know where they come from."""
    numbers = []
    for node in graph.nodes:
        symbolic = node.meta.get("val")
        if isinstance(symbolic, Symbolic):
            numbers.append(node)
            if isinstance(symbolic, torch.SymInt | torch.SymFloat):
                node.replace_all_uses_with(evaluation.evaluate_with_expression(symbolic))
        elif node.op != "output":
            node.meta = {"val": evaluation(symbolic)}
            evaluation.record_expressions(node, symbolic)
    for node in reversed(numbers):
        if node.users:
            raise _FixedError("it computes Python scalars from symbolic sizes")
        graph.erase_node(node)
    lower_symbolic_scalars(graph)
