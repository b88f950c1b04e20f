"""Computes masks of valid positions in a traced program."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import sympy
from jax import lax

from dynamo_backends.graph.symbolic_sizes import SizeWithExpression
from dynamo_backends.xla.lowering.padded.extents import Extent, Extents, Factor, bound_of, is_padded


class Validity:
    """Computes masks of the valid positions from the run-time sizes of a call.

    Args:
        numbers: The real sizes, an array of integers.
        places: Where among them the value of an expression is.
    """

    def __init__(self, numbers: jax.Array, places: Mapping[sympy.Expr, int]):
        self._numbers = numbers
        self._places = places
        self._scalars: dict[sympy.Expr, jax.Array] = {}
        self._along: dict[Extent, jax.Array] = {}

    def number(self, size: SizeWithExpression | sympy.Expr) -> jax.Array:
        """Returns a size in this call, of 64 bits."""
        expression = size.expression if isinstance(size, SizeWithExpression) else size
        if expression not in self._scalars:
            self._scalars[expression] = self._numbers[self._places[expression]]
        return self._scalars[expression]

    def count(self, extent: Extent) -> jax.Array | int:
        """Returns how many positions along a dimension are valid."""
        result: jax.Array | int = 1
        for factor in extent:
            result = result * (factor.bound if factor.size is None else self.number(factor.size))
        return result

    def along(self, extent: Extent) -> jax.Array:
        """Returns for each position along a dimension whether it is valid."""
        if extent not in self._along:
            self._along[extent] = self._computed(extent)
        return self._along[extent]

    def of(self, extents: Extents, dims: Sequence[int]) -> jax.Array | None:
        """Returns the mask of valid positions along some dimensions; None: all are valid."""
        result: jax.Array | None = None
        for d in dims:
            if not is_padded(extents[d]):
                continue
            shape = [1] * len(extents)
            shape[d] = bound_of(extents[d])
            valid = self.along(extents[d]).reshape(shape)
            result = valid if result is None else result & valid
        return result

    def places(self, target: Extent, source: Extent) -> jax.Array:
        """Returns where each valid position of an extent is in another with as many."""
        grid = [factor.bound for factor in target]
        number = jnp.zeros(grid, jnp.int32)
        for axis, factor in enumerate(target):
            position = lax.broadcasted_iota(jnp.int32, grid, axis)
            number = number * self._real(factor) + position
        place, outer = jnp.zeros(grid, jnp.int32), number
        stride = 1
        for factor in reversed(source):
            real = jnp.maximum(self._real(factor), 1)
            place += outer % real * stride
            outer, stride = outer // real, stride * factor.bound
        return place.reshape(-1)

    def _real(self, factor: Factor) -> jax.Array:
        if factor.size is None:
            return jnp.asarray(factor.bound, jnp.int32)
        return self.number(factor.size).astype(jnp.int32)

    def _computed(self, extent: Extent) -> jax.Array:
        grid = [factor.bound for factor in extent]
        valid = jnp.ones(grid, bool)
        for axis, factor in enumerate(extent):
            if factor.size is not None:
                position = lax.broadcasted_iota(jnp.int32, grid, axis)
                valid &= position < self._real(factor)
        return valid.reshape(-1)
