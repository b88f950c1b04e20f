"""Winograd's minimal filtering F(m×m, r×r): r×r convolutions in fewer multiplications.

m² outputs from a tile of n² inputs, n = m + r - 1, take n² multiplications instead of m²·r²: for
3×3 convolutions less than half of them with m = 2 and a quarter with m = 4. Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks" (2015), arXiv:1509.09308. For float32: the transforms
cost a few bits, which other types do not have to spare or are expected to keep. (Of those here only
F2 is used in bfloat16, and where a user admits its errors.) An infinite input makes its whole tile
NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

import numpy as np


@dataclass(frozen=True)
class Transforms:
    """The matrices of one F(m, r): Y = Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A.

    Attributes:
        m: Outputs of a tile, along each side.
        taps: r, of the kernel along each side.
        input: Bᵀ, ``(n, n)``.
        weight: G, ``(n, r)``.
        output: Aᵀ, ``(m, n)``.
    """

    m: int
    taps: int
    input: np.ndarray
    weight: np.ndarray
    output: np.ndarray


def _filtering(taps: int, *points: Fraction | int) -> Transforms:
    """By Toom and Cook: polynomials are multiplied by their values at some points and infinity.

    Args:
        taps: Taps of the kernel.
        points: One fewer than a tile has elements along each side, distinct.
    """
    m = len(points) + 2 - taps
    x = [Fraction(p) for p in points]
    others = [[q for q in x if q != p] for p in x]
    norms = [
        reduce(lambda a, b: a * b, (p - q for q in rest)) for p, rest in zip(x, others, strict=True)
    ]
    rows = [[*_with_roots(rest), 0] for rest in others]
    weight = [[p**j / norm for j in range(taps)] for p, norm in zip(x, norms, strict=True)]
    output = [[*(p**i for p in x), int(i == m - 1)] for i in range(m)]
    return Transforms(
        m,
        taps,
        np.array([*rows, _with_roots(x)], np.float32),
        np.array([*weight, [*[0] * (taps - 1), 1]], np.float64),
        np.array(output, np.float32),
    )


def _with_roots(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of the polynomial with these roots, the constant first."""
    found = [Fraction(1)]
    for root in roots:
        raised, kept = [Fraction(0), *found], [*found, Fraction(0)]
        found = [a - root * b for a, b in zip(raised, kept, strict=True)]
    return found


# Of points that are multiples of 1/8 these have the least rounding errors, half of those of
# 0, ±1 and ±2, which are customary; as many factors are zero.
_FIVE = (0, Fraction(5, 8), -Fraction(5, 8), Fraction(3, 2), -Fraction(3, 2))

F2 = _filtering(3, 0, 1, -1)
F4 = _filtering(3, *_FIVE)
F2_OF_5 = _filtering(5, *_FIVE)
