"""Values that the lowering passes along: jax arrays, possibly stored channels last."""

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


Value = jax.Array | ChannelsLast


def logical(value: Any) -> Any:
    """The array in torch's dimension order; anything that is not `ChannelsLast` as it is."""
    if isinstance(value, ChannelsLast):
        return jnp.moveaxis(value.array, -1, 1)
    return value


def channels_last(value: Value) -> jax.Array:
    """The array (N, *spatial, C) of a tensor with at least three dimensions."""
    if isinstance(value, ChannelsLast):
        return value.array
    return jnp.moveaxis(value, 1, -1)
