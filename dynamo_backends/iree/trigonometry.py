"""Sines, cosines and tangents of float32 numbers of any size.

An argument is brought to -π/2 to π/2 in float64 (Payne and Hanek, Radian reduction for
trigonometric functions, 1983): it is multiplied by 1 / 2π in parts of so few bits that products
are exact, and whole turns are left out of each. A number from 2**47 on is an integer times a power
of two, whose own whole turns are left out beforehand.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

_PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
_BITS = 29  # products with the 24 of float32 have 53


def _turns(power: int) -> tuple[float, ...]:
    """Returns the fraction of turns that 2**power is, as a sum whose last part is rounded."""
    number = 2**power / (2 * _PI) % 1
    parts = []
    for _ in range(2):
        head, exponent = math.frexp(float(number))
        parts.append(math.ldexp(math.floor(head * 2**_BITS), exponent - _BITS))
        number -= Fraction(parts[-1])
    return (*parts, float(number))


_LEAST = (2.0**47, 2.0**74, 2.0**101)
_POWERS = (0, 24, 51, 78)
"""Numbers from each of `_LEAST` on are integers times two to the next of these."""

_SINE = (-0.1666665952120798, 0.008333065430712062, -0.00019809539021951164, 2.6056312364085912e-06)
"""Of (sin(x) / x - 1) / x² from -π/2 to π/2, by powers of x²; relative error 6e-9."""


def _choose(size: Tensor, values: Sequence[float]) -> Tensor:
    """Selects, from a value for each of `_POWERS`, that of numbers of a size."""
    chosen = torch.full((), values[0], dtype=size.dtype)
    for least, value in zip(_LEAST, values[1:], strict=True):
        chosen = torch.where(size >= least, torch.full((), value, dtype=size.dtype), chosen)
    return chosen


def _without_whole(turns: Tensor) -> Tensor:
    return turns - torch.floor(turns + 0.5)


def _half_turns(x: Tensor) -> Tensor:
    """Arguments in units of π, from -1 to 1, in float64."""
    wide = x.double()
    size = wide.abs()
    wide = wide * _choose(size, [2.0**-power for power in _POWERS])
    high, middle, low = zip(*map(_turns, _POWERS), strict=True)
    first = _without_whole(wide * _choose(size, high))
    second = _without_whole(wide * _choose(size, middle))
    return _without_whole(first + second + wide * _choose(size, low)) * 2


def _sine(half_turns: Tensor) -> Tensor:
    """Returns the sine of so many times π, in float32."""
    whole = torch.floor(half_turns + 0.5)
    angle = ((half_turns - whole) * math.pi).float()
    square = angle * angle
    series = torch.full((), _SINE[-1])
    for factor in reversed(_SINE[:-1]):
        series = series * square + factor
    sine = angle * (1 + square * series)  # in this form 0 keeps its sign
    return torch.where(whole.abs() == 1, -sine, sine)


def sin(x: Tensor) -> Tensor:
    """Computes `torch.sin`."""
    return _sine(_half_turns(x)).to(x.dtype)


def cos(x: Tensor) -> Tensor:
    """Computes `torch.cos`."""
    return _sine(_half_turns(x) + 0.5).to(x.dtype)


def tan(x: Tensor) -> Tensor:
    """Computes `torch.tan`."""
    half_turns = _half_turns(x)
    return (_sine(half_turns) / _sine(half_turns + 0.5)).to(x.dtype)
