"""Folds arithmetic on sizes that torch traced as 0-d tensors back into numbers.

Where a float of sizes meets a tensor, torch computes it by calls on tensors: `1 / (n // 4 + 1)` is
six calls, some of them in float64 (`torch.fx.passes._tensorify_python_scalars`). Here they become
one number again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.symbolic_sizes import (
    FloatWithExpression,
    SizeWithExpression,
    collect_varying_sizes,
    integer_subexpressions,
)
from dynamo_backends.graph.symbols import solve_symbol_values, symbol_ranges

aten, prims = torch.ops.aten, torch.ops.prims


def find_scalar_expressions(
    graph: fx.Graph,
) -> dict[fx.Node, SizeWithExpression | FloatWithExpression]:
    """Maps 0-d calls that only compute with sizes to the numbers they stand for.

    Args:
        graph: For concrete shapes; from one with symbolic shapes.
    """
    expressions: dict[fx.Node, sympy.Expr] = {}
    for node in graph.find_nodes(op="call_function", target=aten.scalar_tensor.default):
        _note(node, expressions)
    if not any(collect_varying_sizes(node.args) for node in expressions):
        return {}
    for node in graph.nodes:
        if node.op == "call_function" and node not in expressions:
            _note(node, expressions)
    places = graph.find_nodes(op="placeholder")
    numbers = _Numbers(solve_symbol_values(places), symbol_ranges(places))
    read = (node for node in expressions if any(map(_has_dimensions, node.users)))
    found = ((node, numbers.of(expressions[node])) for node in read)
    return {node: number for node, number in found if number is not None}


def _has_dimensions(user: fx.Node) -> bool:
    value = user.meta.get("val")
    return not isinstance(value, Tensor) or value.ndim > 0


def _note(node: fx.Node, expressions: dict[fx.Node, sympy.Expr]) -> None:
    """Notes what a call computes if that is a number of sizes."""
    value: Any = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim or value.dtype not in _DTYPES:
        return
    if node.target is aten.scalar_tensor.default:
        number: Any = node.args[0]
        if isinstance(number, SizeWithExpression | FloatWithExpression):
            expressions[node] = number.expression
        elif isinstance(number, int | float) and not isinstance(number, bool):
            expressions[node] = sympy.sympify(number)
        return
    arguments = [expressions.get(x) if isinstance(x, fx.Node) else None for x in node.args]
    rounding: Any = node.kwargs.get("rounding_mode")
    if node.target in _CASTS:
        cast = expressions.get(node.all_input_nodes[0])
        if cast is not None and (value.is_floating_point() or cast.is_integer):
            expressions[node] = cast
        return
    function = _FUNCTIONS.get((node.target, rounding))
    if function is not None and None not in arguments:
        made = function(*arguments)
        if made is not None and (value.is_floating_point() or made.is_integer):
            expressions[node] = made


_DTYPES = (torch.float32, torch.float64, torch.int64)
_CASTS = (aten._to_copy.default, prims.convert_element_type.default)


def _divided(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    integers = a.is_integer and b.is_integer
    return private.size_function("IntTrueDiv" if integers else "FloatTrueDiv")(a, b)


def _divided_down(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    if not (a.is_integer and b.is_integer and b.is_positive):
        return None
    return private.size_function("FloorDiv")(a, b)


def _raised(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    if a.is_integer and b.is_integer:
        return a**b if b.is_Integer and b > 0 else None
    return private.size_function("FloatPow")(a, b)


def _of_integers(name: str) -> Callable[..., sympy.Expr | None]:
    def function(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        return private.size_function(name)(a, b) if a.is_integer and b.is_integer else None

    return function


_FUNCTIONS: Mapping[tuple[Any, str | None], Callable[..., sympy.Expr | None]] = {
    (aten.add.Tensor, None): lambda a, b: a + b,
    (aten.div.Tensor, None): _divided,
    (aten.div.Tensor_mode, "floor"): _divided_down,
    (aten.maximum.default, None): _of_integers("Max"),
    (aten.minimum.default, None): _of_integers("Min"),
    (aten.mul.Tensor, None): lambda a, b: a * b,
    (aten.neg.default, None): lambda a: -a,
    (aten.pow.Tensor_Tensor, None): _raised,
    (aten.sqrt.default, None): lambda a: private.size_function("OpaqueUnaryFn_sqrt")(a),
    (aten.sub.Tensor, None): lambda a, b: a - b,
}
"""By the operator and how it rounds; None: the result is no number of sizes."""


class _Numbers:
    """Evaluates expressions over symbols to sizes and floats of one call.

    Args:
        now: Values of symbols.
        ranges: The least and the largest value of expressions; None: there is no largest.
    """

    def __init__(
        self,
        now: Mapping[sympy.Expr, int],
        ranges: Mapping[sympy.Expr, tuple[int, int | None]],
    ):
        self._now = now
        self._ranges = {e: r for e, r in ranges.items() if e.is_Symbol}

    def of(self, expression: sympy.Expr) -> SizeWithExpression | FloatWithExpression | None:
        """Returns an expression as a number; None if constant or unknown in this call."""
        value = sympy.sympify(expression.subs(self._now))
        if not expression.free_symbols or value.free_symbols:
            return None
        if expression.is_integer:
            return self._size(expression, int(value))
        parts = integer_subexpressions(expression)
        sizes = {part: self._size(part, int(part.subs(self._now))) for part in parts}
        return FloatWithExpression(float(value), expression, sizes)

    def _size(self, expression: sympy.Expr, value: int) -> SizeWithExpression:
        return SizeWithExpression(
            value, expression, *private.bounds_within(expression, self._ranges)
        )
