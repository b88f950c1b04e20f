"""What the symbols of a graph are in the call that it was specialized for."""

from collections.abc import Sequence

import sympy
from torch import fx

from dynamo_backends.graph.sizes import Size, sizes_of

_FARTHEST = 4  # times a size, a symbol that it is made of is looked for


def symbol_values(places: Sequence[fx.Node]) -> dict[sympy.Expr, int]:
    """The values of symbols; of expressions where no symbol's value follows from them.

    Args:
        places: Placeholders of a graph for concrete shapes; from one with symbolic shapes.
    """
    now: dict[sympy.Expr, sympy.Integer] = {}
    for size in sorted(_sizes(places), key=lambda size: len(size.expression.free_symbols)):
        unknown = list(size.expression.free_symbols - now.keys())
        value = _solved(size, unknown[0], now) if len(unknown) == 1 else None
        if value is not None:
            now[unknown[0]] = value
        elif unknown:
            now[size.expression] = sympy.Integer(size)
    return {expression: int(value) for expression, value in now.items()}


def symbol_ranges(places: Sequence[fx.Node]) -> dict[sympy.Expr, tuple[int, int | None]]:
    """The least and the largest value of each expression that is a size of a placeholder.

    Args:
        places: As for `symbol_values`.
    """
    return {size.expression: (size.lower, size.upper) for size in _sizes(places)}


def _sizes(places: Sequence[fx.Node]) -> list[Size]:
    values = (v for place in places for v in (place.meta["val"], *sizes_of(place)))
    return [v for v in values if isinstance(v, Size)]


def _solved(
    size: Size, symbol: sympy.Symbol, now: dict[sympy.Expr, sympy.Integer]
) -> sympy.Integer | None:
    """The smallest value of a symbol with which a size is what it is."""
    expression = size.expression.xreplace(now)
    if expression == symbol:
        return sympy.Integer(size)
    tried = map(sympy.Integer, range(1, _FARTHEST * (size + 4)))
    return next((n for n in tried if expression.xreplace({symbol: n}) == size), None)
