"""What the lowerings of linear algebra share."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from torch import fx

Pair = tuple[Array, Array]


def conjugate_transpose(x: Array) -> Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def transpose(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def diagonal(x: Array) -> Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def broadcast_batch(a: Array, b: Array) -> Pair:
    """Gives two matrices the same batch dimensions."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (
        jnp.broadcast_to(a, (*batch, *a.shape[-2:])),
        jnp.broadcast_to(b, (*batch, *b.shape[-2:])),
    )


def triangular(
    a: Array,
    b: Array,
    *,
    lower: bool,
    left: bool = True,
    unit_diagonal: bool = False,
    transpose_a: bool = False,
    conjugate_a: bool = False,
) -> Array:
    """Solves a triangular system, with batch dimensions that broadcast."""
    a, b = broadcast_batch(a, b)
    if b.size == 0:
        return b
    return lax.linalg.triangular_solve(
        a,
        b,
        left_side=left,
        lower=lower,
        unit_diagonal=unit_diagonal,
        transpose_a=transpose_a,
        conjugate_a=conjugate_a,
    )


def raises_itself(node: fx.Node) -> str | None:
    """Refuses calls that check for errors, and raise, on their own."""
    check = node.kwargs.get("check_errors", False)
    return "with check_errors=True it raises on bad input" if check else None


def first_true(bad: Array) -> Array:
    """1 + the index of the first True along the last axis, 0 if there is none."""
    if bad.shape[-1] == 0:
        return jnp.zeros(bad.shape[:-1], jnp.int32)
    return jnp.where(jnp.any(bad, -1), jnp.argmax(bad, -1) + 1, 0).astype(jnp.int32)


def identity(shape: Sequence[int], dtype: jnp.dtype) -> Array:
    """Ones on the diagonals of a batch of matrices."""
    *batch, rows, columns = shape
    return jnp.broadcast_to(jnp.eye(rows, columns, dtype=dtype), (*batch, rows, columns))
