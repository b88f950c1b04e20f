"""Values of the inputs of random graphs: usual ones, and those that rewrites get wrong."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_INF, _NAN = float("inf"), float("nan")


class Input(NamedTuple):
    """An input of a random graph.

    Attributes:
        name: Of the parameter.
        shape: Its shape.
        dtype: Its dtype.
        least: The least position, where it has positions.
        size: Positions are below this; 0: it has other numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    least: int = 0
    size: int = 0


MODERATE = (0.0, -0.0, 18.5, -18.5, 20.0, -20.0, 88.0, -88.0, 89.5, 100.0, -100.0, 120.0, -120.0,
            1.0, -1.0, 0.5, 1e-7, -1e-7, 1e-20, 10.4, 1000.0, -1000.0)  # fmt: skip
FINITE = (*MODERATE, 65520.0, -65520.0, 70000.0, 16777217.0, -16777217.0, 1e20, -1e20, -1e-20, 1e30,
          -1e30, 1e-30, 1e-40, -1e-40, 0.99999994, 2147483648.0)  # fmt: skip
EXTREME = (*FINITE, _INF, -_INF, _NAN)

MEANS = (1000.0, -1e4, 1e6)

FILLS = ("mixed", "finite", "moderate", "planted", "rows", "mean")
"""How a tensor is filled.

Elements are extreme, finite or moderate; one in each row is extreme; rows have equal elements;
random numbers have a large mean.
"""


def usual(given: Input, seed: int) -> Tensor:
    """Values of a first call: `torch.randn`, small integers, any positions."""
    generator = torch.Generator().manual_seed(seed + sum(map(ord, given.name)))
    if given.size:
        return torch.randint(given.least, given.size, given.shape, generator=generator)
    if given.dtype == torch.bool:
        return torch.rand(given.shape, generator=generator) < 0.5
    if given.dtype.is_floating_point:
        return torch.randn(given.shape, generator=generator).to(given.dtype)
    least = 0 if given.dtype == torch.uint8 else -10
    return torch.randint(least, 11, given.shape, generator=generator).to(given.dtype)


def extreme(given: Input, fill: str, seed: int) -> Tensor:
    """Values of a later call.

    Args:
        given: The input.
        fill: One of `FILLS`.
        seed: Which ones.
    """
    choose = random.Random(f"{seed} {given.name} {fill}")
    known = _known(given, fill)
    values = usual(given, seed + 1)
    if not known:
        return values
    if fill == "mean" and given.dtype.is_floating_point:
        return values + choose.choice(MEANS)
    flat = values.view(-1, values.shape[-1]) if values.dim() else values.view(1, 1)
    for row in flat:
        if fill == "planted":
            row[choose.randrange(len(row))] = choose.choice(known)
        elif fill == "rows":
            row.fill_(choose.choice(known))
        else:
            row.copy_(torch.tensor([choose.choice(known) for _ in row], dtype=given.dtype))
    return values


def _known(given: Input, fill: str) -> Sequence[float]:
    if given.dtype == torch.bool:
        return ()
    if given.size:
        return (given.least, given.size - 1, 0)
    if given.dtype.is_floating_point:
        return {"finite": FINITE, "moderate": MODERATE}.get(fill, EXTREME)
    info = torch.iinfo(given.dtype)
    wide = (0, -1, 1, 2, 7, -8, 31, 127, 128, 255, 2**24 + 1, 2**31 - 1, 2**31 + 5, 2**53 + 1)
    near = () if fill == "moderate" else (info.min, info.max, info.min + 1, info.max - 1)
    return (*near, *(n for n in wide if info.min <= n <= info.max))
