"""LU factorisation, and what torch computes from it: solutions, inverses, determinants."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import fx

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import register_lowering

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


def batched_triangular_solve(
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


def refuse_check_errors(node: fx.Node) -> str | None:
    """Returns why check_errors=True has no lowering; None if it is not set."""
    check = node.kwargs.get("check_errors", False)
    return "check_errors=True raises an error for invalid input" if check else None


def first_true(bad: Array) -> Array:
    """Returns LAPACK's info: 1 + index of the first True on the last axis, or 0."""
    if bad.shape[-1] == 0:
        return jnp.zeros(bad.shape[:-1], jnp.int32)
    return jnp.where(jnp.any(bad, -1), jnp.argmax(bad, -1) + 1, 0).astype(jnp.int32)


def identity(shape: Sequence[int], dtype: jnp.dtype) -> Array:
    """Ones on the diagonals of a batch of matrices."""
    *batch, rows, columns = shape
    return jnp.broadcast_to(jnp.eye(rows, columns, dtype=dtype), (*batch, rows, columns))


def _lu(a: Array) -> tuple[Array, Array, Array]:
    """Packed factors, LAPACK's 1-based pivots, and where the first zero pivot is."""
    if a.size == 0:
        pivots = jnp.zeros((*a.shape[:-2], min(a.shape[-2:])), jnp.int32)
        return a, pivots, jnp.zeros(a.shape[:-2], jnp.int32)
    lu, pivots, _ = lax.linalg.lu(a)
    return lu, pivots.astype(jnp.int32) + 1, first_true(diagonal(lu) == 0)


def _permutation(pivots: Array, size: int) -> Array:
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, size)


def _rows(b: Array, index: Array) -> Array:
    return jnp.take_along_axis(b, index[..., None], axis=-2)


def _factorised_as_transpose(ctx: Context) -> bool:
    """Returns whether torch factorises `A.mT`, which is how a contiguous real A lies in memory.

    The backward formulas, already in the graph, rely on it.
    """
    a = ctx.node.args[0].meta["val"]  # type: ignore[union-attr]
    return a.is_contiguous() and not a.is_complex()


def _no_pivoting(node: fx.Node) -> str | None:
    pivot = node.kwargs.get("pivot", True)
    return None if pivot else "XLA has no LU without pivoting"


def _lu_factor_refusal(node: fx.Node) -> str | None:
    return _no_pivoting(node) or refuse_check_errors(node)


@register_lowering("linalg_lu_factor_ex.default", when=_lu_factor_refusal)
def lu_factor_ex(
    a: Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array]:
    return _lu(a)


@register_lowering("lu_unpack.default")
def lu_unpack(
    ctx: Context,
    data: Array,
    pivots: Array,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> tuple[Array, Array, Array]:
    m, n = data.shape[-2:]
    k = min(m, n)
    p, lower, upper = (jnp.zeros(tuple(o.shape), data.dtype) for o in ctx.out)
    if unpack_data:
        lower = jnp.tril(data[..., :, :k], -1) + jnp.eye(m, k, dtype=data.dtype)
        upper = jnp.triu(data[..., :k, :])
    if unpack_pivots and p.size:
        permutation = _permutation(pivots, m)
        p = transpose(jnp.take(jnp.eye(m, dtype=data.dtype), permutation, axis=0))
    return p, lower, upper


@register_lowering("linalg_lu.default", when=_no_pivoting)
def lu(ctx: Context, a: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    data, pivots, _ = _lu(a)
    return lu_unpack(ctx, data, pivots)


@register_lowering("linalg_lu_solve.default")
def lu_solve(
    lu: Array, pivots: Array, b: Array, *, left: bool = True, adjoint: bool = False
) -> Array:
    if not left:
        flipped = lu_solve(lu, pivots, conjugate_transpose(b), adjoint=not adjoint)
        return conjugate_transpose(flipped)
    lu, b = broadcast_batch(lu, b)
    if b.size == 0:
        return b
    size = lu.shape[-1]
    permutation = jnp.broadcast_to(_permutation(pivots, size), (*lu.shape[:-2], size))
    conjugate = adjoint and jnp.iscomplexobj(lu)
    if adjoint:
        b = batched_triangular_solve(lu, b, lower=False, transpose_a=True, conjugate_a=conjugate)
        b = batched_triangular_solve(
            lu, b, lower=True, unit_diagonal=True, transpose_a=True, conjugate_a=conjugate
        )
        return _rows(b, jnp.argsort(permutation, axis=-1))
    b = batched_triangular_solve(lu, _rows(b, permutation), lower=True, unit_diagonal=True)
    return batched_triangular_solve(lu, b, lower=False)


@functools.cache
def _solve_transposes() -> bool:
    """Returns whether this torch's `_linalg_solve_ex` factorises `A.mT`, too."""
    with disable_current_modes(), torch.no_grad():
        a = torch.tensor([[1.0, 2.0], [4.0, 1.0]])
        factors = torch.ops.aten._linalg_solve_ex.default(a, torch.ones(2))[1]
        return factors[0, 0].item() != 4.0


@register_lowering("_linalg_solve_ex.default", when=refuse_check_errors)
def solve_ex(
    ctx: Context, a: Array, b: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    as_transpose = _solve_transposes() and _factorised_as_transpose(ctx)
    lu, pivots, info = _lu(transpose(a) if as_transpose else a)
    x = lu_solve(lu, pivots, b[..., None] if vector else b, left=left, adjoint=as_transpose)
    return (x[..., 0] if vector else x), lu, pivots, info


@register_lowering("linalg_inv_ex.default", when=refuse_check_errors)
def inv_ex(a: Array, *, check_errors: bool = False) -> Pair:
    lu, pivots, info = _lu(a)
    return lu_solve(lu, pivots, identity(a.shape, a.dtype)), info


def _pivot_sign(lu: Array, pivots: Array) -> Array:
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), -1)
    return jnp.where(swaps % 2 == 1, -1, 1).astype(lu.dtype)


@register_lowering("_linalg_det.default")
def det(ctx: Context, a: Array) -> tuple[Array, Array, Array]:
    lu, pivots, _ = _lu(transpose(a) if _factorised_as_transpose(ctx) else a)
    return _pivot_sign(lu, pivots) * jnp.prod(diagonal(lu), -1), lu, pivots


@register_lowering("_linalg_slogdet.default")
def slogdet(ctx: Context, a: Array) -> tuple[Array, Array, Array, Array]:
    lu, pivots, _ = _lu(transpose(a) if _factorised_as_transpose(ctx) else a)
    factors = diagonal(lu)
    sign = _pivot_sign(lu, pivots) * jnp.prod(jnp.sign(factors), -1)
    return sign, jnp.sum(jnp.log(jnp.abs(factors)), -1), lu, pivots
