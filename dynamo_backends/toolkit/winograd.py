"""Winograd's minimal filtering F(m×m, 3×3): 3×3 convolutions in fewer multiplications.

m² outputs from a tile of (m+2)² inputs take (m+2)² multiplications instead of 9·m²: less than half
of them for m = 2, a quarter for m = 4. Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks" (2015), arXiv:1509.09308. Float32 only: the transforms cost a few bits, which other types
do not have to spare or are expected to keep. An infinite input makes its whole tile NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

import numpy as np

_TAPS = 3


@dataclass(frozen=True)
class Transforms:
    """The matrices of one F(m, 3): Y = Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A.

    Attributes:
        m: Outputs of a tile, along each side.
        input: Bᵀ, ``(m+2, m+2)``.
        weight: G, ``(m+2, 3)``.
        output: Aᵀ, ``(m, m+2)``.
    """

    m: int
    input: np.ndarray
    weight: np.ndarray
    output: np.ndarray


def _filtering(*points: Fraction | int) -> Transforms:
    """By Toom and Cook: polynomials are multiplied by their values at some points and infinity.

    Args:
        points: One fewer than a tile has elements along each side, distinct.
    """
    m = len(points) + 2 - _TAPS
    x = [Fraction(p) for p in points]
    others = [[q for q in x if q != p] for p in x]
    norms = [
        reduce(lambda a, b: a * b, (p - q for q in rest)) for p, rest in zip(x, others, strict=True)
    ]
    rows = [[*_with_roots(rest), 0] for rest in others]
    weight = [[p**j / norm for j in range(_TAPS)] for p, norm in zip(x, norms, strict=True)]
    output = [[*(p**i for p in x), int(i == m - 1)] for i in range(m)]
    return Transforms(
        m,
        np.array([*rows, _with_roots(x)], np.float32),
        np.array([*weight, [0, 0, 1]], np.float64),
        np.array(output, np.float32),
    )


def _with_roots(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of the polynomial with these roots, the constant first."""
    found = [Fraction(1)]
    for root in roots:
        raised, kept = [Fraction(0), *found], [*found, Fraction(0)]
        found = [a - root * b for a, b in zip(raised, kept, strict=True)]
    return found


F2 = _filtering(0, 1, -1)

# Of points that are multiples of 1/8 these have the least rounding errors, half of those of
# 0, ±1 and ±2, which are customary; as many factors are zero.
F4 = _filtering(0, Fraction(5, 8), -Fraction(5, 8), Fraction(3, 2), -Fraction(3, 2))
