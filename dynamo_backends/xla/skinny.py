"""Products of a few rows with a large matrix, as decoding makes them, at the speed of memory.

XLA's CPU client multiplies one row by a matrix in one thread, and for some rows it first packs the
matrix anew at every call. As a product with a batch of parts of the matrix, which lie in memory one
after the other, it reads them where they are, in several threads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from dynamo_backends.xla.equations import in_place_of

FEW = 32
"""So many rows are few."""

LARGE = 1 << 19
"""Bytes of a matrix for which this pays."""


@dataclass(frozen=True)
class _Product:
    """A product of rows and a matrix whose last dimension is contracted.

    Attributes:
        eqn: The equation.
        matrix: Which operand is the matrix.
        rows: How many rows the other one has.
    """

    eqn: Any
    matrix: int
    rows: int

    @property
    def avals(self) -> list[Any]:
        """Shape and dtype of both operands."""
        return [v.aval for v in self.eqn.invars]


def split_skinny(program: core.ClosedJaxpr, threads: int) -> core.ClosedJaxpr:
    """Returns the same program; large matrices that few rows are multiplied by are read in parts.

    Args:
        program: After `products.simplify_products`.
        threads: So many parts, at most, are read at once.
    """
    eqns: list[Any] = []
    for eqn in program.jaxpr.eqns:
        product = _skinny(eqn)
        parts = 1 if product is None else _parts(product, threads)
        if product is None or parts == 1:
            eqns.append(eqn)
        else:
            eqns += in_place_of(eqn, _in_parts(product, parts))
    return core.ClosedJaxpr(program.jaxpr.replace(eqns=eqns), program.consts)


def _skinny(eqn: Any) -> _Product | None:
    if eqn.primitive.name != "dot_general":
        return None
    contracted, batch = eqn.params["dimension_numbers"]
    if batch[0] or len(contracted[0]) != 1:
        return None
    x, y = (v.aval for v in eqn.invars)
    for matrix, other, dims in ((1, x, contracted[1]), (0, y, contracted[0])):
        aval = eqn.invars[matrix].aval
        rows = other.size // max(aval.shape[-1], 1) if aval.ndim == 2 else 0
        is_large = aval.size * aval.dtype.itemsize >= LARGE
        if dims == (1,) and is_large and 1 <= rows <= FEW and _is_plain(x, y, eqn.outvars[0].aval):
            return _Product(eqn, matrix, rows)
    return None


def _is_plain(*avals: Any) -> bool:
    return all(a.dtype == np.float32 for a in avals)


def _parts(product: _Product, threads: int) -> int:
    """Returns how many: a divisor of the matrix's rows."""
    aval = product.avals[product.matrix]
    most = min(threads, 4 * aval.size * aval.dtype.itemsize // LARGE)
    return next(n for n in range(max(most, 1), 0, -1) if aval.shape[0] % n == 0)


def _in_parts(product: _Product, parts: int) -> Callable[..., jax.Array]:
    params = product.eqn.params
    place = 1 - product.matrix
    (dim,) = params["dimension_numbers"][0][place]
    shape = product.eqn.outvars[0].aval.shape

    def multiply(*operands: jax.Array) -> jax.Array:
        matrix, x = operands[product.matrix], operands[place]
        outputs, features = matrix.shape
        order = [*(d for d in range(x.ndim) if d != dim), dim]
        x = lax.reshape(lax.transpose(x, order), (product.rows, features))
        # Not broadcast: what XLA fused with that would compute NaN (see `repeated`).
        repeated = lax.concatenate([lax.expand_dims(x, (0,))] * parts, 0)
        result = lax.dot_general(
            lax.reshape(matrix, (parts, outputs // parts, features)),
            repeated,
            (((2,), (2,)), ((0,), (0,))),
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )
        result = lax.reshape(result, (outputs, product.rows))
        return lax.reshape(result.T if product.matrix == 1 else result, shape)

    return multiply
