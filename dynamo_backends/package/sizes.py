"""Other calls of the same model: the example's at other sizes of the ranges."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import size_bounds
from dynamo_backends.capture.precompile import resized
from dynamo_backends.package.portable import Portable

_CALLS = 4
"""Sets of sizes that are called with: three tell the sizes of most graphs apart."""

_OPEN = 64
"""Without an upper bound sizes are taken from so many above the example's."""


def calls_in_range(call: Any, portable: Portable) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
    """The example's arguments, then those of other sizes.

    Args:
        call: `(args, kwargs)`.
        portable: Says which sizes there are.
    """
    yield call
    leaves, spec = pytree.tree_flatten(call)
    bounds = _symbols(portable.leaves, leaves)
    for number in range(1, _CALLS if bounds else 0):
        sizes = {
            symbol: least + (size - least + number * (i + 1)) % (most - least + 1)
            for i, (symbol, (size, least, most)) in enumerate(bounds.items())
        }
        made = [_made(x, like, sizes) for x, like in zip(leaves, portable.leaves, strict=True)]
        yield pytree.tree_unflatten(made, spec)


def _symbols(known: Sequence[Any], leaves: Sequence[Any]) -> dict[Any, tuple[int, int, int]]:
    """The example's size, the least and the largest one of each symbol."""
    found: dict[Any, tuple[int, int, int]] = {}
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
    return resized(value, [_number(size, sizes) for size in like.shape])


def _number(size: Any, sizes: Mapping[Any, int]) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(sympy.sympify(size.node.expr).xreplace(dict(sizes)))
