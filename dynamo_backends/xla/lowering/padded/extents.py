"""Describes which positions of a padded array are a tensor's elements.

A dimension of an array is a grid of *factors*, outermost first, since a view may have merged
several dimensions. An element is valid if each of its coordinates is below its factor's real size.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from dynamo_backends.graph.symbolic_sizes import SizeWithExpression


@dataclass(frozen=True)
class Factor:
    """Describes one factor of a padded dimension: its bound and its valid size.

    Attributes:
        bound: How many positions there are.
        size: How many are valid, over the symbols of the graph; None: all.
    """

    bound: int
    size: sympy.Expr | None = None

    @property
    def expression(self) -> sympy.Expr:
        """Returns how many are valid."""
        return sympy.Integer(self.bound) if self.size is None else self.size


Extent = tuple[Factor, ...]
"""The factors of a dimension; none if its size is 1."""

Extents = tuple[Extent, ...]
"""Of all dimensions of an array."""


def extent_of(size: int) -> Extent:
    """Returns the extent of a dimension that was never merged.

    Args:
        size: A `SizeWithExpression`, whose value is the bound, or a plain number.
    """
    if isinstance(size, SizeWithExpression) and size.expression.free_symbols:
        return (Factor(int(size), size.expression),)
    return () if size == 1 else (Factor(int(size)),)


def extents_of(sizes: Iterable[int]) -> Extents:
    """Returns the extents of an array of whose dimensions none was merged."""
    return tuple(map(extent_of, sizes))


def is_padded(extent: Extent) -> bool:
    """Returns whether not all positions are valid."""
    return any(f.size is not None for f in extent)


def size_from_extent(extent: Extent) -> int:
    """Returns a dimension's size: symbolic if its valid size depends on symbols."""
    expression = expression_of(extent)
    if not expression.free_symbols:
        return bound_of(extent)
    return SizeWithExpression(bound_of(extent), expression, 0, None)


def padded_dims(extents: Extents) -> list[int]:
    """Returns the dimensions in which not all positions are valid."""
    return [d for d, extent in enumerate(extents) if is_padded(extent)]


def bound_of(extent: Extent) -> int:
    """Returns the padded size of a dimension."""
    return math.prod(f.bound for f in extent)


def expression_of(extent: Extent) -> sympy.Expr:
    """Returns the valid size of a dimension as a sympy expression."""
    return sympy.expand(sympy.prod([f.expression for f in extent]))


def merged(factors: Sequence[Factor]) -> Extent:
    """Merges the factors of one dimension to canonical form.

    A prefix of a dimension merged with all of one inside it is a prefix of the result.
    """
    found: list[Factor] = []
    for factor in factors:
        if factor.size is None and factor.bound == 1:
            continue
        if factor.size is None and found:
            outer = found.pop()
            size = None if outer.size is None else sympy.expand(outer.size * factor.bound)
            found.append(Factor(outer.bound * factor.bound, size))
        else:
            found.append(factor)
    return tuple(found)


def broadcast(operands: Sequence[Extents]) -> Extents | None:
    """The extents of an elementwise result; None if as many positions of operands are not valid.

    Of operands of which not all know what was merged, those count that know more.
    """
    ndim = max((len(x) for x in operands), default=0)
    result: list[Extent] = []
    for d in range(-ndim, 0):
        known = list(dict.fromkeys(x[d] for x in operands if len(x) >= -d and x[d]))
        if len({(bound_of(e), expression_of(e)) for e in known}) > 1:
            return None
        result.append(max(known, key=len) if known else ())
    return tuple(result)


def reshaped(extents: Extents, sizes: Sequence[int]) -> Extents | None:
    """Returns the extents of a view.

    Args:
        extents: Of what is viewed.
        sizes: Sizes of the view.

    Returns:
        None: its dimensions are not made of those of `extents`.
    """
    left = [factor for extent in extents for factor in extent]
    result: list[Extent] = []
    for size in sizes:
        taken = _take(left, size)
        if taken is None:
            return None
        result.append(merged(taken))
    return None if left else tuple(result)


def _take(left: list[Factor], size: int) -> list[Factor] | None:
    """Takes the factors of one dimension from the front of those that are left."""
    bound = int(size)
    wanted = size.expression if isinstance(size, SizeWithExpression) else sympy.Integer(bound)
    taken: list[Factor] = []
    while bound > 1 or wanted != 1:
        if not left:
            return None
        split = _split(left.pop(0), bound, wanted)
        if split is None:
            return None
        first, rest = split
        taken.append(first)
        if rest > 1:
            left.insert(0, Factor(rest))
        bound //= first.bound
        wanted = sympy.cancel(wanted / first.expression)
    return taken


def _split(factor: Factor, bound: int, wanted: sympy.Expr) -> tuple[Factor, int] | None:
    """The part of a factor that belongs to a dimension, and how many positions are inside it."""
    if factor.size is None:
        needed = math.gcd(factor.bound, int(wanted.as_coeff_Mul()[0]))
        if needed != factor.bound and (needed <= 1 or wanted != needed):
            return None
        return (Factor(needed), factor.bound // needed) if bound % needed == 0 else None
    if bound % factor.bound == 0:
        return factor, 1
    inside = sympy.cancel(factor.size / wanted)
    if inside.is_Integer and bound * int(inside) == factor.bound:
        return Factor(bound, wanted), int(inside)
    return None
