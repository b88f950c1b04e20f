"""Rounds dynamic sizes up to the bounds of padded programs."""

import bisect
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import sympy

from dynamo_backends.interface.protocols import BucketRule, NamedBounds
from dynamo_backends.runtime.cache import LRU

Sizes = Mapping[sympy.Symbol, int]
"""The values of all symbols of a graph, always in the same order."""

LEAST = 2
"""No dimension is padded to less: graphs of size 1 are other ones."""

_SEEN = 256
"""Number of sets of sizes that are remembered."""

_CHOICES = 1024
"""Largest number of sets of bounds among which the best is searched."""


def round_up(value: int, growth: float, most: int | None = None) -> int:
    """Returns the smallest bound of a growing sequence that is at least `value`.

    Args:
        value: The size.
        growth: The ratio of a bound to the one before it, about.
        most: The largest value that guards allow; None: there is none.
    """
    bound = LEAST
    while bound < value:
        step = 1 if bound * growth <= 8 else 4 if bound * growth <= 32 else 8
        bound = max(bound // step + 1, round(bound * growth / step)) * step
    return bound if most is None else max(min(bound, most), value)


def count_positions(sizes: Sizes) -> int:
    """Returns the product of all sizes, a measure of a program's work."""
    return math.prod(max(n, 1) for n in sizes.values())


def padding_ratio(bounds: Sizes, sizes: Sizes) -> float:
    """Returns padded work divided by real work; infinite if a size exceeds its bound."""
    if any(n > bounds[s] for s, n in sizes.items()):
        return math.inf
    return count_positions(bounds) / count_positions(sizes)


class BucketRounding:
    """Rounds the sizes of one graph up to bounds.

    Args:
        rule: How.
        most: Symbols of dimensions, and the largest values that guards allow of them.
        named: Bounds that the user named, by symbol.
    """

    def __init__(
        self,
        rule: BucketRule,
        most: Mapping[sympy.Symbol, int | None],
        named: Mapping[str, Sequence[int]],
    ):
        self._growth = rule.growth
        self._most = most
        self._named = named

    def nearest_bounds(self, sizes: Sizes) -> Sizes | None:
        """Returns the closest bounds; None if the sizes exceed the user's bounds."""
        return self._rounded(sizes, self._growth)

    def wide_bounds(self, sizes: Sizes) -> Sizes | None:
        """Returns bounds at powers of two, or the user's; None if sizes exceed them."""
        return self._rounded(sizes, max(self._growth, 2))

    def _rounded(self, sizes: Sizes, growth: float) -> Sizes | None:
        found = {}
        for symbol, size in sizes.items():
            bound = self._bound(symbol, size, growth)
            if bound is None:
                return None
            found[symbol] = bound
        return found

    def _bound(self, symbol: sympy.Symbol, size: int, growth: float) -> int | None:
        if symbol not in self._most:  # not the size of a dimension
            return size
        named = self._named.get(str(symbol), ())
        place = bisect.bisect_left(named, size)
        most = self._most[symbol]
        if place < len(named):
            return named[place] if most is None else max(min(named[place], most), size)
        return round_up(size, growth, most) if self._growth > 1 else None


class PaddingDemand:
    """Remembers sizes of calls to find the bounds that would reduce padding most.

    Args:
        rounding: Rounding of the graph.
        allowed: Ratio of computed to real positions that is narrow enough.
    """

    def __init__(self, rounding: BucketRounding, allowed: float):
        self._rounding = rounding
        self._allowed = allowed
        self._seen: LRU[tuple[int, ...], Sizes] = LRU(_SEEN)

    def note_sizes(self, sizes: Sizes) -> None:
        """Records the sizes of a call."""
        self._seen.put(tuple(sizes.values()), sizes)

    def is_narrow_enough(self, bounds: Sizes, sizes: Sizes) -> bool:
        """Returns whether a program's bounds are close enough to a call's sizes."""
        narrow = self._rounding.nearest_bounds(sizes)
        if narrow is None:
            return True
        return padding_ratio(bounds, sizes) <= max(self._allowed, padding_ratio(narrow, sizes))

    def find_best_bounds(
        self, there: Sequence[Sizes], refused: Collection[tuple[int, ...]]
    ) -> Sizes | None:
        """Returns the bounds that would reduce padding most; None if none would.

        Args:
            there: Bounds of the programs that there are.
            refused: Values of bounds that there can be no program for.
        """
        unmet = [(s, n) for s in tuple(self._seen.values()) if (n := self._spare(s, there)) > 0]
        best, most = None, 0
        for bounds in self._choices([sizes for sizes, _ in unmet]):
            own = count_positions(bounds)
            spared = sum(
                n - own for s, n in unmet if n > own and padding_ratio(bounds, s) < math.inf
            )
            if spared > most and tuple(bounds.values()) not in refused:
                best, most = bounds, spared
        return best

    def _spare(self, sizes: Sizes, there: Sequence[Sizes]) -> int:
        """Returns the positions that are computed for sizes; 0: there may be so many."""
        best = min(
            (b for b in there if padding_ratio(b, sizes) < math.inf),
            key=count_positions,
            default=None,
        )
        return 0 if best is None or self.is_narrow_enough(best, sizes) else count_positions(best)

    def _choices(self, unmet: Sequence[Sizes]) -> list[Sizes]:
        """Bounds of these sizes, and what they can be combined to."""
        rounded = [b for s in unmet if (b := self._rounding.nearest_bounds(s)) is not None]
        if not rounded:
            return []
        values = [sorted({b[symbol] for b in rounded}) for symbol in rounded[0]]
        if math.prod(map(len, values)) > _CHOICES:
            return rounded
        return [dict(zip(rounded[0], chosen, strict=True)) for chosen in itertools.product(*values)]


def named_bounds(
    named: NamedBounds, inputs: Mapping[str, Sequence[str]]
) -> dict[str, tuple[int, ...]]:
    """Returns the user's bounds for each symbol of the graph.

    Args:
        named: For all dimensions, or by input and dimension.
        inputs: The symbols of the dimensions of the captured graph's inputs, by their names; empty
            where a size does not vary, or is no symbol alone.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, symbols in inputs.items():
        for dim, symbol in enumerate(symbols):
            if not symbol:
                continue
            if not isinstance(named, Mapping):
                found[symbol] = tuple(named)
            elif name in named:
                given = {d % len(symbols): bounds for d, bounds in named[name].items()}
                if dim in given:
                    found[symbol] = tuple(given[dim])
    return found
