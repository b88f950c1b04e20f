"""Other calls of the same model: the example's at other sizes of the ranges."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import size_bounds
from dynamo_backends.capture.precompile import resize_by_repeating
from dynamo_backends.interface.protocols import BucketRule
from dynamo_backends.package.portable import Portable
from dynamo_backends.pipeline.shapes.buckets import named_bounds, round_up

_CALLS = 4
"""Sets of sizes that are called with: three tell the sizes of most graphs apart."""

_OPEN = 64
"""Without an upper bound, sizes up to this much above the example's are tried."""


_Ranges = dict[Any, tuple[int, int, int]]
"""The example's size, the least and the largest one of each symbol."""


def calls_in_range(
    call: Any, portable: Portable, rule: BucketRule | None, most: int
) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """The example's arguments, and those of other sizes.

    Where inputs are padded, smaller sizes come first: each gets a program of its own then.

    Args:
        call: `(args, kwargs)`.
        portable: Says which sizes there are.
        rule: How a backend that pads inputs rounds up sizes: there is a call for each bound.
        most: Number of programs that may be kept.
    """
    leaves, spec = pytree.tree_flatten(call)
    ranges = _ranges(portable.leaves, leaves)
    if rule is None:
        yield call
        wanted = [_varied(ranges, number) for number in range(1, _CALLS if ranges else 0)]
    else:
        wanted = _at_bounds(ranges, rule, named_bounds(rule.named, portable.facts.symbols), most)
    for sizes in wanted:
        made = [_made(x, like, sizes) for x, like in zip(leaves, portable.leaves, strict=True)]
        yield pytree.tree_unflatten(made, spec)
    if rule is not None:
        yield call


def _varied(ranges: _Ranges, number: int) -> dict[Any, int]:
    """Sizes of the ranges; their steps differ, so that no two are always equal."""
    return {
        symbol: least + (size - least + number * (i + 1)) % (top - least + 1)
        for i, (symbol, (size, least, top)) in enumerate(ranges.items())
    }


def _at_bounds(
    ranges: _Ranges, rule: BucketRule, named: Mapping[str, Sequence[int]], most: int
) -> list[dict[Any, int]]:
    """Sizes at all bounds, or, where these are too many programs, at bounds of all symbols."""
    ladders = [
        _bounds(least, top, rule.growth, named.get(str(symbol), ()))
        for symbol, (_, least, top) in ranges.items()
    ]
    if math.prod(map(len, ladders)) <= most:
        chosen: Any = itertools.product(*ladders) if ladders else ()
    else:
        longest = max(map(len, ladders))
        chosen = zip(*([*x, *[x[-1]] * (longest - len(x))] for x in ladders), strict=True)
    return [dict(zip(ranges, sizes, strict=True)) for sizes in chosen]


def _bounds(least: int, top: int, growth: float, named: Sequence[int]) -> list[int]:
    found = sorted({min(max(n, least), top) for n in named})
    size = found[-1] + 1 if found else least
    while size <= top and growth > 1:
        found.append(round_up(size, growth, top))
        size = found[-1] + 1
    return found or [top]


def _ranges(known: Sequence[Any], leaves: Sequence[Any]) -> _Ranges:
    found: _Ranges = {}
    for like, value in zip(known, leaves, strict=True):
        sizes = like.shape if isinstance(like, Tensor) else (like,)
        shown = value.shape if isinstance(like, Tensor) else (value,)
        for symbolic, size in zip(sizes, shown, strict=True):
            if isinstance(symbolic, torch.SymInt) and symbolic.node.expr.is_Symbol:
                least, most = size_bounds(symbolic)
                top = size + _OPEN if most is None else most
                found[symbolic.node.expr] = size, max(least, min(2, size)), top
    return found


def _made(value: Any, like: Any, sizes: Mapping[Any, int]) -> Any:
    if isinstance(like, torch.SymInt):
        return _number(like, sizes)
    if not isinstance(like, Tensor):
        return value
    return resize_by_repeating(value, [_number(size, sizes) for size in like.shape])


def _number(size: Any, sizes: Mapping[Any, int]) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(sympy.sympify(size.node.expr).xreplace(dict(sizes)))
