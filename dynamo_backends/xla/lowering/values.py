"""Values that the lowering passes along: jax arrays, possibly stored in another way."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ChannelsLast:
    """A tensor of torch shape (N, C, *spatial) that is stored as an array (N, *spatial, C)."""

    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that torch sees."""
        batch, *spatial, channels = self.array.shape
        return (batch, channels, *spatial)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.array.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """Element type."""
        return self.array.dtype


@dataclass(frozen=True)
class Flat:
    """A tensor that is stored as an array of one dimension.

    Attributes:
        array: The elements as they lie in memory.
        shape: The shape that torch sees.
        order: Its dimensions as they lie in memory, outermost first.
    """

    array: jax.Array
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        """Insists on the number of elements."""
        if self.array.shape != (math.prod(self.shape),):
            raise ValueError(f"{self.array.shape} is not {self.shape} in one dimension")

    @property
    def ndim(self) -> int:
        """Number of dimensions that torch sees."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Element type."""
        return self.array.dtype


Value = jax.Array | ChannelsLast
"""What lowerings are given and return; `Flat` stays with the interpreter."""


def logical(value: Any) -> Any:
    """The array in torch's dimension order; anything that is stored so, or no tensor, as it is."""
    if isinstance(value, ChannelsLast):
        return jnp.moveaxis(value.array, -1, 1)
    if isinstance(value, Flat):
        dense = value.array.reshape([value.shape[d] for d in value.order])
        return jnp.transpose(dense, sorted(range(value.ndim), key=value.order.__getitem__))
    return value


def flat(value: Value | Flat, order: tuple[int, ...]) -> jax.Array:
    """The elements of a tensor as they lie in memory that has its dimensions in this order."""
    if isinstance(value, Flat) and value.order == order:
        return value.array
    return jnp.transpose(logical(value), order).reshape(-1)


def channels_last(value: Value) -> jax.Array:
    """Returns the array (N, *spatial, C) of a tensor with at least three dimensions."""
    if isinstance(value, ChannelsLast):
        return value.array
    return jnp.moveaxis(value, 1, -1)
