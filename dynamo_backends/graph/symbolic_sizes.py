"""Defines integers of one call that keep the symbolic expression they come from.

A graph for concrete shapes may have come from one with symbolic shapes. For a backend that can
serve a range of shapes with one program, `specialize` leaves in it what the symbols were.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import (
    FakeTensor,
    FakeTensorMode,
    apply_conj_neg_bits,
    bounds_of,
)
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.interface.errors import CompileError

Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool

SIZES = "sizes"
"""Key in a node's `meta`: the sizes of its tensor, as a tuple of numbers, some of them
`SizeWithExpression`.

Of a node with several tensors, one such tuple each.
"""

STRIDES = "strides"
"""The same of the strides of its tensor."""


def is_symbolic(value: Any) -> bool:
    """Returns whether a value is a SymInt, SymFloat, SymBool, or a tensor with such sizes."""
    if isinstance(value, Symbolic):
        return True
    if isinstance(value, torch.Tensor):
        return any(isinstance(s, Symbolic) for s in (*value.shape, *value.stride()))
    return False


class SizeWithExpression(int):
    """An `int`: a size in one call that keeps its symbolic expression and its bounds.

    Args:
        value: In this call.
        expression: Over the symbols of the captured graph.
        lower: The smallest value that the guards allow.
        upper: The largest one, or the one at the bound (see `cap_sizes_at_current`); None: there is
            no bound.
    """

    expression: sympy.Expr
    lower: int
    upper: int | None

    def __new__(cls, value: int, expression: sympy.Expr, lower: int, upper: int | None) -> Self:
        """Makes the integer and attaches its expression and bounds."""
        size = super().__new__(cls, value)
        size.expression = expression
        size.lower = lower
        size.upper = upper
        return size

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Returns the arguments that copies are made with."""
        return int(self), self.expression, self.lower, self.upper


class FloatWithExpression(float):
    """A `float` computed from sizes in one call that keeps its symbolic expression.

    Args:
        value: In this call.
        expression: How it is computed.
        sizes: The largest parts of the expression that are integers.
    """

    expression: sympy.Expr
    sizes: Mapping[sympy.Expr, SizeWithExpression]

    def __new__(
        cls, value: float, expression: sympy.Expr, sizes: Mapping[Any, SizeWithExpression]
    ) -> Self:
        """Makes the float and attaches its expression and its sizes."""
        number = super().__new__(cls, value)
        number.expression = expression
        number.sizes = sizes
        return number

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Returns the arguments that copies are made with."""
        return float(self), self.expression, self.sizes


class SymbolicEvaluator:
    """Evaluates a graph's symbolic expressions for one call's symbol values, with a cache.

    Args:
        bindings: The values of symbols.
        given: What sizes remember instead of an expression over these symbols.
    """

    def __init__(
        self,
        bindings: Mapping[sympy.Expr, Any],
        given: Callable[[sympy.Expr], sympy.Expr] = lambda expression: expression,
    ):
        self._bindings = bindings
        self._given = given
        self._mode = FakeTensorMode()
        self._numbers: dict[sympy.Expr, Any] = {}
        self._sizes: dict[sympy.Expr, SizeWithExpression] = {}

    def __call__(self, value: Any) -> Any:
        """Evaluates a SymInt or SymFloat to a number, a symbolic tensor to a concrete fake one.

        Raises:
            ValueError: It does not follow from the bindings.
        """
        if isinstance(value, Symbolic):
            number = self._number(value.node.expr)
            if isinstance(value, torch.SymBool):
                return bool(number)
            return float(number) if isinstance(value, torch.SymFloat) else int(number)
        if isinstance(value, Tensor):
            if value.layout != torch.strided or not isinstance(value, FakeTensor):
                return value
            # Also of those that do not vary: other threads may use the mode that made them, during
            # whose calls `value.device` is "meta".
            size, stride = map(self, value.shape), map(self, value.stride())
            with self._mode:
                memory = torch.empty_strided(
                    list(size), list(stride), dtype=value.dtype, device=value.fake_device
                )
                return apply_conj_neg_bits(value, memory)
        if isinstance(value, list | tuple):
            return tuple(map(self, value))
        return value

    def _number(self, expression: Any) -> Any:
        if expression not in self._numbers:
            number = sympy.sympify(sympy.sympify(expression).subs(self._bindings))
            if number.free_symbols:
                raise ValueError(
                    f"the symbolic size {expression} does not follow from the inputs' shapes"
                )
            self._numbers[expression] = number
        return self._numbers[expression]

    def evaluate_with_expression(self, symbolic: Any) -> Any:
        """Evaluates to a number that keeps its symbolic expression."""
        if isinstance(symbolic, torch.SymFloat) and symbolic.node.expr.free_symbols:
            expression = symbolic.node.expr
            parts = [self._size(symbolic, part) for part in integer_subexpressions(expression)]
            sizes = {size.expression: size for size in parts}
            return FloatWithExpression(self(symbolic), self._given(expression), sizes)
        if not isinstance(symbolic, torch.SymInt):
            return self(symbolic)
        return self._size(symbolic, symbolic.node.expr)

    def _size(
        self, symbolic: torch.SymInt | torch.SymFloat, part: sympy.Expr
    ) -> SizeWithExpression:
        if part not in self._sizes:
            value, bounds = int(self._number(part)), bounds_of(symbolic, part)
            self._sizes[part] = SizeWithExpression(value, self._given(part), *bounds)
        return self._sizes[part]

    def record_expressions(self, node: fx.Node, symbolic: Any) -> None:
        """Records the expressions of a node's sizes and strides in its `meta`.

        Args:
            node: The node.
            symbolic: Its symbolic value.
        """
        if isinstance(symbolic, Tensor):
            node.meta[SIZES] = tuple(map(self.evaluate_with_expression, symbolic.shape))
            node.meta[STRIDES] = tuple(map(self.evaluate_with_expression, symbolic.stride()))
        elif isinstance(symbolic, list | tuple):
            node.meta[SIZES] = tuple(
                tuple(map(self.evaluate_with_expression, s.shape)) if isinstance(s, Tensor) else ()
                for s in symbolic
            )


def integer_subexpressions(expression: sympy.Expr) -> Iterator[sympy.Expr]:
    """Yields the largest integer subexpressions that contain symbols."""
    if expression.is_integer and expression.free_symbols:
        yield expression
    elif expression.free_symbols:
        for part in expression.args:
            yield from integer_subexpressions(part)


def drop_size_expressions(graph: fx.Graph) -> None:
    """Replaces sizes with expressions by plain integers: one shape only; in place."""

    def plain(value: Any) -> Any:
        return int(value) if isinstance(value, SizeWithExpression) else value

    for node in graph.nodes:
        node.meta.pop(SIZES, None)
        node.meta.pop(STRIDES, None)
        node.args = fx.node.map_aggregate(node.args, plain)
        node.kwargs = fx.node.map_aggregate(node.kwargs, plain)


def sizes_of(node: fx.Node) -> tuple[int | None, ...]:
    """Returns a node's sizes, with expressions where they vary; None for unknown ones.

    Those of a graph that was never symbolic are all plain numbers.
    """
    value = node.meta["val"]
    return _known(node, SIZES, value.shape) if isinstance(value, Tensor) else ()


def strides_of(node: fx.Node) -> tuple[int | None, ...]:
    """Returns a node's strides, with expressions where they vary; None for unknown ones."""
    value = node.meta["val"]
    return _known(node, STRIDES, value.stride()) if isinstance(value, Tensor) else ()


def _known(node: fx.Node, key: str, concrete: Sequence[int]) -> tuple[int | None, ...]:
    known = node.meta.get(key)
    if known is not None and tuple(known) == tuple(concrete):
        return tuple(known)
    return (None,) * len(concrete)


def has_size_expressions(graph: fx.Graph) -> bool:
    """Returns whether a specialized graph keeps the symbolic expressions of its inputs."""
    return any(
        isinstance(size, SizeWithExpression)
        for node in graph.find_nodes(op="placeholder")
        for size in (node.meta.get("val"), *(node.meta.get(SIZES) or ()))
    )


def all_varying_sizes(graph: Graph) -> Iterator[SizeWithExpression]:
    """Yields every size with an expression: in values, arguments and outputs."""
    for node in graph.module.graph.nodes:
        values = (node.args, node.kwargs, node.meta.get("val"), node.meta.get(SIZES))
        yield from collect_varying_sizes(values)


def inner_varying_sizes(graph: Graph) -> Iterator[SizeWithExpression]:
    """Yields sizes with an expression, except numbers that are only passed through.

    Those were all that passes could have decided by.
    """
    for node in graph.module.graph.nodes:
        values = (node.meta.get(SIZES), () if node.op == "output" else (node.args, node.kwargs))
        yield from collect_varying_sizes(values)


def distinct_varying_sizes(graph: Graph) -> list[SizeWithExpression]:
    """Returns the sizes that may vary, one for each distinct expression."""
    return _distinct(all_varying_sizes(graph))


def _distinct(sizes: Iterable[SizeWithExpression]) -> list[SizeWithExpression]:
    return list({size.expression: size for size in sizes}.values())


def symbols_of_dimensions(graph: Graph) -> frozenset[sympy.Symbol]:
    """Returns the symbols in the sizes of input tensors; other symbols are number inputs.

    All others are numbers that it is given as such.
    """
    sizes = collect_varying_sizes([place.meta.get(SIZES) for place in graph.placeholders])
    return frozenset().union(*(size.expression.free_symbols for size in sizes))


def without_unused_numbers(graph: Graph) -> Graph:
    """Copies a graph without number inputs that have no users."""
    graph = graph.copy()
    left = []
    for place, x in zip(graph.placeholders, graph.inputs, strict=True):
        if place.users or isinstance(place.meta["val"], Tensor):
            left.append(x)
        else:
            graph.module.graph.erase_node(place)
    return dataclasses.replace(graph, inputs=tuple(left))


def size_ranges(graph: Graph, exact: bool = True) -> list[tuple[int, int | None]]:
    """Returns the (lower, upper) bounds of each size that may vary; no upper bound is None.

    Args:
        graph: For concrete shapes; from one with symbolic shapes.
        exact: Else only whether a size may be 0 or 1 (see `Backend.depends_on_ranges`).
    """
    ranges = {size.expression: (size.lower, size.upper) for size in all_varying_sizes(graph)}
    return [r if exact else (min(r[0], 2), None) for r in ranges.values()]


def cap_sizes_at_current(graph: Graph) -> None:
    """Sets the upper bound of every size in the graph to its current value."""
    for size in all_varying_sizes(graph):
        size.upper = int(size)


def collect_varying_sizes(values: Any) -> list[SizeWithExpression]:
    """Collects, from nested arguments, sizes with expressions and those inside floats.

    Args:
        values: Nested as the arguments of a node are.
    """
    found: list[SizeWithExpression] = []

    def note(value: Any) -> Any:
        if isinstance(value, SizeWithExpression):
            found.append(value)
        elif isinstance(value, FloatWithExpression):
            found.extend(value.sizes.values())
        return value

    fx.node.map_aggregate(values, note)
    return found


SIZE_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "CeilToInt": math.ceil,
    "CleanDiv": operator.floordiv,
    "FloatPow": operator.pow,
    "FloatTrueDiv": operator.truediv,
    "FloorDiv": operator.floordiv,
    "FloorToInt": math.floor,
    "IntTrueDiv": operator.truediv,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "OpaqueUnaryFn_sqrt": math.sqrt,
    "PowByNatural": operator.pow,
    "PythonMod": operator.mod,
    "RoundToInt": round,
    "ToFloat": float,
    "TruncToInt": math.trunc,
}
"""What torch's functions in expressions compute, by their names; sizes are not negative."""


class SizeReader:
    """Computes sizes, and floats of sizes, from the shapes of a call's inputs.

    Args:
        places: Placeholders of a graph for concrete shapes that came from symbolic ones.
        wanted: Sizes and floats of sizes of the graph; plain numbers are themselves.

    Raises:
        CompileError: One does not follow from the inputs' shapes.
    """

    def __init__(self, places: Sequence[fx.Node], wanted: Sequence[int | float]):
        known = _sources(places)
        symbols: dict[sympy.Expr, sympy.Dummy] = {}
        results = [_in_terms_of(size, known, symbols) for size in wanted]
        self._sources = [known[e] for e in symbols]
        self._compute = sympy.lambdify(
            list(symbols.values()), results, modules=[dict(SIZE_FUNCTIONS)]
        )
        concrete = [p.meta["val"] for p in places]
        try:
            right = all(map(_is_equal, self(concrete), wanted))
        except NameError as error:
            raise CompileError(f"a size is computed by a function unknown here: {error}") from error
        if not right:
            raise CompileError("sizes do not follow from the inputs' shapes as torch says")

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Returns the wanted sizes and floats for one call's inputs.

        Args:
            values: One per placeholder.
        """
        symbols = [_read(values, source) for source in self._sources]
        found: list[Any] = self._compute(*symbols)
        return found


def _is_equal(found: float, wanted: float) -> bool:
    if isinstance(wanted, FloatWithExpression):  # its products may be in another order than sympy's
        return math.isclose(found, wanted, rel_tol=1e-14)
    return found == wanted


_Source = tuple[int, int | None, bool]
"""An input, and a dimension of it (None: the input is a number); whether it is the stride there."""


def _sources(places: Sequence[fx.Node]) -> dict[sympy.Expr, _Source]:
    """Returns where each expression can be read."""
    known: dict[sympy.Expr, _Source] = {}
    for i, place in enumerate(places):
        value = place.meta["val"]
        if isinstance(value, SizeWithExpression):
            known.setdefault(value.expression, (i, None, False))
        for dim, size in enumerate(sizes_of(place)):
            if isinstance(size, SizeWithExpression):
                known.setdefault(size.expression, (i, dim, False))
    # Strides of views may be symbols of their own; what follows from sizes need not be theirs.
    for i, place in enumerate(places):
        for dim, stride in enumerate(strides_of(place)):
            if isinstance(stride, SizeWithExpression) and stride.expression.is_Symbol:
                known.setdefault(stride.expression, (i, dim, True))
    return known


def _read(values: Sequence[Any], source: _Source) -> int:
    place, dim, is_stride = source
    value = values[place]
    if dim is None:
        return int(value)
    return int(value.stride(dim) if is_stride else value.shape[dim])


def _in_terms_of(
    size: int | float, known: Mapping[sympy.Expr, _Source], symbols: dict[sympy.Expr, sympy.Dummy]
) -> Any:
    """An expression over dummies of what is known; `symbols` gets those that it needs."""
    if not isinstance(size, SizeWithExpression | FloatWithExpression):
        return sympy.sympify(size)
    expression = size.expression
    if expression in known:
        needed = [expression]
    elif expression.free_symbols <= known.keys():
        needed = sorted(expression.free_symbols, key=str)
    else:  # of parts of it, such as s0//2 of (s0//2)**2
        needed = sorted((part for part in known if expression.has(part)), key=str)
    for part in needed:
        symbols.setdefault(part, sympy.Dummy(integer=True, nonnegative=True))
    found = expression.xreplace({part: symbols[part] for part in needed})
    if not found.free_symbols <= set(symbols.values()):
        raise CompileError(f"the size {expression} does not follow from inputs' shapes")
    return found


def with_sizes_as_inputs(graph: Graph) -> tuple[Graph, list[SizeWithExpression]]:
    """Copies a graph and turns its varying sizes into extra inputs; returns the sizes.

    So it computes what the graph stands for in calls of every size.

    Args:
        graph: For concrete shapes; from one with symbolic shapes.

    Returns:
        The copy, and the sizes that its last inputs are in this call.
    """
    graph = graph.copy()
    body = graph.module.graph
    calls = [*graph.calls, body.output_node()]
    sizes = _distinct(
        size for node in calls for size in collect_varying_sizes((node.args, node.kwargs))
    )
    added = lift_sizes_to_inputs(body, sizes)
    graph.module.recompile()
    inputs = tuple(Input(place.name, Role.SYMBOL) for place in added)
    return dataclasses.replace(graph, inputs=graph.inputs + inputs), sizes


def lift_sizes_to_inputs(body: fx.Graph, sizes: Sequence[SizeWithExpression]) -> list[fx.Node]:
    """Adds a placeholder for each size and uses it in all arguments, in place.

    Raises:
        CompileError: Among the arguments is another size that varies.
    """
    last = next((n for n in body.nodes if n.op != "placeholder"), body.output_node())
    places: dict[sympy.Expr, fx.Node] = {}
    for i, size in enumerate(sizes):
        with body.inserting_before(last):
            place = body.placeholder(f"size_{i}")
        place.meta["val"] = size
        places[size.expression] = place

    def input_for(value: Any) -> Any:
        if not isinstance(value, SizeWithExpression):
            return value
        if value.expression not in places:
            raise CompileError(f"the size {value.expression} is not known")
        return places[value.expression]

    for node in body.nodes:
        node.args = fx.node.map_aggregate(node.args, input_for)
        node.kwargs = fx.node.map_aggregate(node.kwargs, input_for)
    return list(places.values())
