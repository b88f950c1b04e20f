"""Sizes that are integers for one call and know the expression that they come from.

A graph for concrete shapes may have come from one with symbolic shapes. For a backend that can
serve a range of shapes with one program, `specialize` leaves in it what the symbols were.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import size_bounds
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.roles import Input, Role
from dynamo_backends.interface.errors import CompileError

Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool

SIZES = "sizes"
"""Key in a node's `meta`: the sizes of its tensor, as a tuple of numbers, some of them `Size`.

Of a node with several tensors, one such tuple each.
"""

STRIDES = "strides"
"""The same of the strides of its tensor."""


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic number or a tensor with symbolic sizes."""
    if isinstance(value, Symbolic):
        return True
    if isinstance(value, torch.Tensor):
        return any(isinstance(s, Symbolic) for s in (*value.shape, *value.stride()))
    return False


class Size(int):
    """A size of one call; in arithmetic, text and hashes a plain integer.

    Args:
        value: In this call.
        expression: Over the symbols of the captured graph.
        lower: The smallest value that the guards allow.
        upper: The largest one, or the one at the bound (see `cap`); None: there is no bound.
    """

    expression: sympy.Expr
    lower: int
    upper: int | None

    def __new__(cls, value: int, expression: sympy.Expr, lower: int, upper: int | None) -> Self:
        """See the class."""
        size = super().__new__(cls, value)
        size.expression = expression
        size.lower = lower
        size.upper = upper
        return size

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For copies."""
        return int(self), self.expression, self.lower, self.upper


def remembering(symbolic: Any, value: Any) -> Any:
    """The value of a symbolic integer in one call as a `Size`; of anything else, as it is."""
    if isinstance(symbolic, torch.SymInt):
        return Size(value, symbolic.node.expr, *size_bounds(symbolic))
    return value


def remember_sizes(node: fx.Node, symbolic: Any, value: Any) -> None:
    """Notes with a node where the sizes and strides of its tensors come from.

    Args:
        node: The node.
        symbolic: Its symbolic value.
        value: The value in one call.
    """
    if isinstance(symbolic, Tensor):
        node.meta[SIZES] = _remembering_all(symbolic.shape, value.shape)
        node.meta[STRIDES] = _remembering_all(symbolic.stride(), value.stride())
    elif isinstance(symbolic, list | tuple):
        pairs = zip(symbolic, value, strict=True)
        node.meta[SIZES] = tuple(
            _remembering_all(s.shape, v.shape) if isinstance(s, Tensor) else () for s, v in pairs
        )


def _remembering_all(symbolic: Sequence[Any], value: Sequence[int]) -> tuple[Any, ...]:
    return tuple(remembering(s, v) for s, v in zip(symbolic, value, strict=True))


def forget_sizes(graph: Graph) -> None:
    """Makes a graph one for concrete shapes only."""
    for node in graph.module.graph.nodes:
        node.meta.pop(SIZES, None)
        node.meta.pop(STRIDES, None)


def sizes_of(node: fx.Node) -> tuple[int | None, ...]:
    """The sizes of a node's tensor; None for those that nothing is known of but this call's value.

    Those of a graph that was never symbolic are all plain numbers.
    """
    value = node.meta["val"]
    return _known(node, SIZES, value.shape) if isinstance(value, Tensor) else ()


def strides_of(node: fx.Node) -> tuple[int | None, ...]:
    """The strides of a node's tensor (see `sizes_of`)."""
    value = node.meta["val"]
    return _known(node, STRIDES, value.stride()) if isinstance(value, Tensor) else ()


def _known(node: fx.Node, key: str, concrete: Sequence[int]) -> tuple[int | None, ...]:
    known = node.meta.get(key)
    if known is not None and tuple(known) == tuple(concrete):
        return tuple(known)
    return (None,) * len(concrete)


def is_ranged(graph: fx.Graph) -> bool:
    """Whether a graph for concrete shapes came from one with symbolic shapes."""
    return any(
        isinstance(size, Size)
        for node in graph.find_nodes(op="placeholder")
        for size in node.meta.get(SIZES) or ()
    )


def all_sizes(graph: Graph) -> Iterator[Size]:
    """Every size of a graph that may vary: of values, among arguments and among outputs."""
    for node in graph.module.graph.nodes:
        values = (node.args, node.kwargs, node.meta.get("val"), node.meta.get(SIZES))
        yield from sizes_in(values)


def ranges_of(graph: Graph) -> list[tuple[int, int | None]]:
    """The least and the largest value of each size of a graph that may vary, in order."""
    ranges = {size.expression: (size.lower, size.upper) for size in all_sizes(graph)}
    return list(ranges.values())


def cap(graph: Graph) -> None:
    """Makes the sizes of a graph the largest ones that it is for."""
    for size in all_sizes(graph):
        size.upper = int(size)


def sizes_in(values: Any) -> list[Size]:
    """Those among values, in order, that may vary.

    Args:
        values: Nested as the arguments of a node are.
    """
    found: list[Size] = []

    def note(value: Any) -> Any:
        if isinstance(value, Size):
            found.append(value)
        return value

    fx.node.map_aggregate(values, note)
    return found


SIZE_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "CleanDiv": operator.floordiv,
    "FloorDiv": operator.floordiv,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}
"""What torch's functions in expressions compute, by their names; sizes are not negative."""


class SizeReader:
    """Computes sizes from the inputs of a call.

    Args:
        places: Placeholders of a graph for concrete shapes that came from symbolic ones.
        wanted: Sizes of the graph; plain numbers are themselves.

    Raises:
        CompileError: One does not follow from the inputs' shapes.
    """

    def __init__(self, places: Sequence[fx.Node], wanted: Sequence[int]):
        known = _sources(places)
        symbols: dict[sympy.Expr, sympy.Dummy] = {}
        results = [_in_terms_of(size, known, symbols) for size in wanted]
        self._sources = [known[e] for e in symbols]
        self._compute = sympy.lambdify(
            list(symbols.values()), results, modules=[dict(SIZE_FUNCTIONS)]
        )
        concrete = [p.meta["val"] for p in places]
        try:
            right = self(concrete) == [int(s) for s in wanted]
        except NameError as error:
            raise CompileError(f"a size is computed by a function unknown here: {error}") from error
        if not right:
            raise CompileError("sizes do not follow from the inputs' shapes as torch says")

    def __call__(self, values: Sequence[Any]) -> list[int]:
        """The sizes.

        Args:
            values: One per placeholder.
        """
        symbols = [_read(values, source) for source in self._sources]
        found: list[int] = self._compute(*symbols)
        return found


_Source = tuple[int, int | None, bool]
"""An input, and a dimension of it (None: the input is a number); whether it is the stride there."""


def _sources(places: Sequence[fx.Node]) -> dict[sympy.Expr, _Source]:
    """Where each expression can be read."""
    known: dict[sympy.Expr, _Source] = {}
    for i, place in enumerate(places):
        value = place.meta["val"]
        if isinstance(value, Size):
            known.setdefault(value.expression, (i, None, False))
        for dim, size in enumerate(sizes_of(place)):
            if isinstance(size, Size):
                known.setdefault(size.expression, (i, dim, False))
    # Strides of views may be symbols of their own; what follows from sizes need not be theirs.
    for i, place in enumerate(places):
        for dim, stride in enumerate(strides_of(place)):
            if isinstance(stride, Size) and stride.expression.is_Symbol:
                known.setdefault(stride.expression, (i, dim, True))
    return known


def _read(values: Sequence[Any], source: _Source) -> int:
    place, dim, is_stride = source
    value = values[place]
    if dim is None:
        return int(value)
    return int(value.stride(dim) if is_stride else value.shape[dim])


def _in_terms_of(
    size: int, known: Mapping[sympy.Expr, _Source], symbols: dict[sympy.Expr, sympy.Dummy]
) -> Any:
    """An expression over dummies of what is known; `symbols` gets those that it needs."""
    if not isinstance(size, Size):
        return sympy.Integer(size)
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


def opened(graph: Graph) -> tuple[Graph, list[Size]]:
    """A copy of a graph in which sizes that vary are further inputs, after all others.

    So it computes what the graph stands for in calls of every size.

    Args:
        graph: For concrete shapes; from one with symbolic shapes.

    Returns:
        The copy, and the sizes that its last inputs are in this call.
    """
    graph = graph.copy()
    body = graph.module.graph
    last = next((n for n in body.nodes if n.op != "placeholder"), body.output_node())
    inputs: dict[sympy.Expr, tuple[fx.Node, Size]] = {}

    def input_for(value: Any) -> Any:
        if not isinstance(value, Size):
            return value
        if value.expression not in inputs:
            with body.inserting_before(last):
                place = body.placeholder(f"size_{len(inputs)}")
            place.meta["val"] = value
            inputs[value.expression] = place, value
        return inputs[value.expression][0]

    for node in [*graph.calls, body.output_node()]:
        node.args = fx.node.map_aggregate(node.args, input_for)
        node.kwargs = fx.node.map_aggregate(node.kwargs, input_for)
    graph.module.recompile()
    added = tuple(Input(place.name, Role.SYMBOL) for place, _ in inputs.values())
    complete = dataclasses.replace(graph, inputs=graph.inputs + added)
    return complete, [size for _, size in inputs.values()]
