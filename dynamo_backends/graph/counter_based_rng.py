"""Draws random numbers with Threefry, counter-based: the same on every device.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
The key is a seed of 64 bits, the counter the place of an element in row-major order, so numbers
depend neither on strides nor on who computes which part. `SEEDED_DRAW` is the operator; this is its
kernel on the host, and the definition of what devices compute.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.custom_ops import register_op

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Of the rounds, which take turns by four."""

PARITY = 0x1BD11BDA
"""What the third word of a key is made with."""

SECOND = 1 << 31
"""In the counter's upper word: a second block of bits for the same element."""

DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""Bits of a uniform number, those of the dtype's significand; as torch's kernels for the CPU."""

_WORD = 0xFFFFFFFF


def threefry2x32(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Computes the Threefry-2x32 block of a key and counters: two 32-bit words each.

    Args:
        key: Two words, in 64-bit integers.
        counter: Likewise, of any shape.
    """
    keys = (*key, key[0] ^ key[1] ^ PARITY)
    x, y = (counter[0] + keys[0]) & _WORD, (counter[1] + keys[1]) & _WORD
    for turn in range(5):
        for rotation in ROTATIONS[turn % 2]:
            x = (x + y) & _WORD
            y = ((y << rotation) & _WORD | y >> 32 - rotation) ^ x
        x = (x + keys[(turn + 1) % 3]) & _WORD
        y = (y + keys[(turn + 2) % 3] + turn + 1) & _WORD
    return x, y


def _bits(seed: Tensor, count: int, second: bool = False) -> tuple[Tensor, Tensor]:
    places = torch.arange(count)
    high = (places >> 32) | (SECOND if second else 0)
    return threefry2x32((seed >> 32, seed & _WORD), (high, places & _WORD))


def _unit(words: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1), of as many digits as the dtype has."""
    digits = DIGITS[dtype]
    if digits > 32:
        return ((words[0] << 21) | (words[1] >> 11)).double() * 2.0**-53
    return (words[0] >> 32 - digits).float() * 2.0**-digits


def _inner(words: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Numbers in (0, 1): their logarithms are finite and not 0."""
    if dtype is torch.float64:
        return ((words[0] << 20 | words[1] >> 12) * 2 + 1).double() * 2.0**-53
    return ((words[0] >> 9) * 2 + 1).float() * 2.0**-24


def _bernoulli(seed: Tensor, count: int, dtype: torch.dtype, p: float) -> Tensor:
    return _bits(seed, count)[0] < round(p * 2**32)


def _uniform(seed: Tensor, count: int, dtype: torch.dtype, low: float, high: float) -> Tensor:
    return _unit(_bits(seed, count), dtype) * (high - low) + low


def _normal(seed: Tensor, count: int, dtype: torch.dtype, mean: float, std: float) -> Tensor:
    words = _bits(seed, count)
    if dtype is torch.float64:
        angle = _unit(_bits(seed, count, second=True), dtype)
    else:
        angle = _unit((words[1], words[1]), torch.float32)
    length = torch.sqrt(-2 * torch.log(_inner(words, dtype)))
    return length * torch.cos(2 * math.pi * angle) * std + mean


def _exponential(seed: Tensor, count: int, dtype: torch.dtype, rate: float) -> Tensor:
    return -torch.log(_inner(_bits(seed, count), dtype)) / rate


def _random(seed: Tensor, count: int, dtype: torch.dtype, low: float, high: float) -> Tensor:
    high_word, low_word = _bits(seed, count)
    return (high_word << 31 | low_word >> 1) % int(high - low) + int(low)


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "bernoulli_": _bernoulli,
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
    "random_": _random,
}

DEFAULTS: dict[str, tuple[float, ...]] = {
    "bernoulli_": (0.5,),
    "uniform_": (0.0, 1.0),
    "normal_": (0.0, 1.0),
    "exponential_": (1.0,),
}
"""Arguments of the methods of torch's; `random_` without any draws from the whole dtype."""


def _draw(
    seeds: Tensor,
    place: int,
    method: str,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    arguments: Sequence[float],
) -> Tensor:
    made = _KERNELS[method](seeds[place], math.prod(shape), dtype, *arguments)
    return _fake(seeds, place, method, shape, strides, dtype, arguments).copy_(made.view(shape))


def _fake(
    seeds: Tensor,
    place: int,
    method: str,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    arguments: Sequence[float],
) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=seeds.device)


SEEDED_DRAW = register_op(
    "seeded_draw(Tensor seeds, int place, str method, SymInt[] shape, SymInt[] strides,"
    " ScalarType dtype, float[] arguments) -> Tensor",
    _draw,
    _fake,
)
"""A tensor of random numbers.

Args: seeds, int64 [n]; which of them; the method of `Tensor` that draws from the same distribution;
the result's sizes, strides and dtype; the method's arguments.
"""


def supports_distribution(method: str, dtype: torch.dtype, arguments: Sequence[Any]) -> bool:
    """Returns whether `SEEDED_DRAW` supports a method with this dtype and arguments.

    Args:
        method: Such as "bernoulli_".
        dtype: Dtype of the result.
        arguments: All of the method's.
    """
    if method not in _KERNELS or not all(type(x) in (int, float) for x in arguments):
        return False
    if method == "random_":
        exact = len(arguments) == 2 and all(abs(x) <= 2**53 for x in arguments)
        return exact and dtype is not torch.bool and 0 < arguments[1] - arguments[0] <= 2**53
    if len(arguments) != len(DEFAULTS[method]):
        return False
    if method == "bernoulli_":
        return 0 <= arguments[0] <= 1 and not dtype.is_complex
    return dtype in DIGITS
