"""Sizes that calls never tell apart: the same passes are shown other ones."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import sympy

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.sequence import PASSES
from dynamo_backends.graph.specialize import Symbols
from dynamo_backends.graph.symbols import symbol_ranges, symbol_values

log = logging.getLogger("dynamo_backends")


def with_distinct_sizes(
    symbols: Symbols, graph: Graph, still: Collection[Any] = ()
) -> Graph | None:
    """Returns a graph for sizes of which no two symbols have the same, after all passes.

    The caches of two layers are as long as each other in every call, and yet two sizes.

    Args:
        symbols: Of the captured graph.
        graph: Specialised from it, for sizes of a call.
        still: Symbols that have other values than in the call.

    Returns:
        None: there are no such sizes within the guards, or the passes take none.
    """
    ranges = symbol_ranges(graph.placeholders)
    sizes = distinct(symbol_values(graph.placeholders), ranges, still)
    if sizes is None:
        return None
    try:
        other = symbols.specialized(symbols.arguments(sizes))
        PASSES(other)
    except Exception:
        log.debug("sizes are not told apart", exc_info=True)
        return None
    return other


def distinct(
    sizes: Mapping[sympy.Expr, int],
    ranges: Mapping[sympy.Expr, tuple[int, int | None]],
    still: Collection[Any] = (),
) -> dict[sympy.Symbol, int] | None:
    """Values of symbols near those of a call, all of them different.

    Args:
        sizes: The values of a call.
        ranges: The least and the largest value of some of them; None: there is no largest.
        still: Symbols that get other values than these.

    Returns:
        None: there are none, or the symbols' values do not follow from the sizes.
    """
    found: dict[sympy.Symbol, int] = {}
    for symbol, size in sizes.items():
        lower, upper = ranges.get(symbol, (size, size))
        above = range(size, size + len(sizes) + 1)
        below = range(size - 1, max(lower, size - len(sizes) - 1) - 1, -1)
        allowed = [n for n in (*above, *below) if lower <= n and (upper is None or n <= upper)]
        taken = {*found.values(), *([size] if symbol in still else [])}
        free = [n for n in allowed if n not in taken]
        if not symbol.is_Symbol or not free:
            return None
        found[symbol] = free[0]
    return found
