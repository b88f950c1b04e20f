"""Draws random numbers from seeds, by the generator that `graph.counter_generator` defines."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynamo_backends.graph.counter_based_rng import DIGITS, PARITY, ROTATIONS, SECOND
from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.registry import register_lowering

Words = tuple[jax.Array, jax.Array]


def threefry(key: Words, counter: Words) -> Words:
    """Two words of 32 random bits.

    Args:
        key: Two words, uint32.
        counter: Likewise, of any shape.
    """
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for turn in range(5):
        for rotation in ROTATIONS[turn % 2]:
            x = x + y
            y = (y << jnp.uint32(rotation) | y >> jnp.uint32(32 - rotation)) ^ x
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x, y


def _bits(seed: jax.Array, shape: Sequence[int], second: bool = False) -> Words:
    count = math.prod(shape)
    if count <= 2**32:
        low = lax.iota(jnp.uint32, count).reshape(shape)
        high = jnp.zeros((), jnp.uint32)
    else:
        places = lax.iota(jnp.uint64, count).reshape(shape)
        low, high = places.astype(jnp.uint32), (places >> 32).astype(jnp.uint32)
    if second:
        high = high | jnp.uint32(SECOND)
    key = (seed >> 32).astype(jnp.uint32), (seed & 0xFFFFFFFF).astype(jnp.uint32)
    return threefry(key, (jnp.broadcast_to(high, low.shape), low))


def _unit(words: Words, dtype: torch.dtype) -> jax.Array:
    digits = DIGITS[dtype]
    if digits > 32:
        high, low = (word.astype(jnp.uint64) for word in words)
        return (high << 21 | low >> 11).astype(jnp.float64) * 2.0**-53
    return (words[0] >> jnp.uint32(32 - digits)).astype(jnp.float32) * 2.0**-digits


def _inner(words: Words, dtype: torch.dtype) -> jax.Array:
    if dtype is torch.float64:
        high, low = (word.astype(jnp.uint64) for word in words)
        return ((high << 20 | low >> 12) * 2 + 1).astype(jnp.float64) * 2.0**-53
    return ((words[0] >> 9) * 2 + 1).astype(jnp.float32) * 2.0**-24


def _bernoulli(seed: jax.Array, shape: Sequence[int], dtype: torch.dtype, p: float) -> jax.Array:
    bound = round(p * 2**32)
    if bound == 2**32:  # no word is as large
        return jnp.ones(shape, bool)
    return _bits(seed, shape)[0] < jnp.uint32(bound)


def _uniform(
    seed: jax.Array, shape: Sequence[int], dtype: torch.dtype, low: float, high: float
) -> jax.Array:
    return _unit(_bits(seed, shape), dtype) * (high - low) + low


def _normal(
    seed: jax.Array, shape: Sequence[int], dtype: torch.dtype, mean: float, std: float
) -> jax.Array:
    words = _bits(seed, shape)
    if dtype is torch.float64:
        angle = _unit(_bits(seed, shape, second=True), dtype)
    else:
        angle = _unit((words[1], words[1]), torch.float32)
    length = jnp.sqrt(-2 * jnp.log(_inner(words, dtype)))
    return length * jnp.cos(2 * math.pi * angle) * std + mean


def _exponential(
    seed: jax.Array, shape: Sequence[int], dtype: torch.dtype, rate: float
) -> jax.Array:
    return -jnp.log(_inner(_bits(seed, shape), dtype)) / rate


def _random(
    seed: jax.Array, shape: Sequence[int], dtype: torch.dtype, low: float, high: float
) -> jax.Array:
    upper, lower = (word.astype(jnp.int64) for word in _bits(seed, shape))
    return (upper << 31 | lower >> 1) % int(high - low) + int(low)


_DISTRIBUTIONS: dict[str, Callable[..., jax.Array]] = {
    "bernoulli_": _bernoulli,
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
    "random_": _random,
}


@register_lowering("dynamo_backends::seeded_draw.default")
def seeded_draw(
    seeds: jax.Array,
    place: int,
    method: str,
    shape: Sequence[int],
    strides: Any,
    dtype: torch.dtype,
    arguments: Sequence[float],
) -> jax.Array:
    made = _DISTRIBUTIONS[method](seeds[place], tuple(shape), dtype, *arguments)
    return made.astype(to_jax(dtype))
