"""Factorisations, solvers and functions of matrices; distances between vectors.

Where torch raises on singular input, the graph holds a `_linalg_check_errors` of its own next to
these operators; it has no lowering and so runs eagerly, on the `info` that is computed here.
Operators that raise by themselves on such input have no lowering.
"""

import math

import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import Array, lax
from torch import fx

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.linalg_lu import (
    Pair,
    batched_triangular_solve,
    broadcast_batch,
    conjugate_transpose,
    diagonal,
    identity,
    refuse_check_errors,
    transpose,
)
from dynamo_backends.xla.lowering.reduction import vector_norm, widen
from dynamo_backends.xla.lowering.registry import Predicate, register_lowering

# --- Cholesky


def _failing_minor(a: Array) -> Array:
    """1 + the first leading minor that is not positive: elimination without pivoting."""
    n = a.shape[-1]

    def step(k: Array, state: Pair) -> Pair:
        a, info = state
        pivot = jnp.real(a[..., k, k])
        info = jnp.where((info == 0) & ~(pivot > 0), k + 1, info)
        column = a[..., :, k] * (jnp.arange(n) > k)
        outer = column[..., :, None] * jnp.conj(column)[..., None, :]
        return a - outer / pivot[..., None, None].astype(a.dtype), info

    start = jnp.zeros(a.shape[:-2], jnp.int32)
    return lax.fori_loop(0, n, step, (a, start))[1]


@register_lowering("linalg_cholesky_ex.default", when=refuse_check_errors)
def cholesky_ex(a: Array, *, upper: bool = False, check_errors: bool = False) -> Pair:
    """The factor is NaN, not partial as in LAPACK, where `info` says that there is none."""
    if a.size == 0:
        return a, jnp.zeros(a.shape[:-2], jnp.int32)
    a = conjugate_transpose(a) if upper else a
    factor = lax.linalg.cholesky(jnp.tril(a), symmetrize_input=False)
    failed = jnp.any(jnp.isnan(diagonal(factor)))
    info = lax.cond(
        failed,
        _failing_minor,
        lambda a: jnp.zeros(a.shape[:-2], jnp.int32),
        jnp.tril(a) + conjugate_transpose(jnp.tril(a, -1)),
    )
    return (conjugate_transpose(factor) if upper else factor), info


@register_lowering("_cholesky_solve_helper.default", "cholesky_solve.default")
def cholesky_solve(b: Array, factor: Array, upper: bool = False) -> Array:
    """Solves `A x = b` with `A = L L^H` or `A = U^H U`."""
    complex_ = jnp.iscomplexobj(factor)
    half = batched_triangular_solve(
        factor, b, lower=not upper, transpose_a=upper, conjugate_a=upper and complex_
    )
    return batched_triangular_solve(
        factor, half, lower=not upper, transpose_a=not upper, conjugate_a=not upper and complex_
    )


# --- Triangular systems


@register_lowering("linalg_solve_triangular.default")
def solve_triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    return batched_triangular_solve(a, b, lower=not upper, left=left, unit_diagonal=unitriangular)


@register_lowering("triangular_solve.default")
def triangular_solve(
    b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Pair:
    a, b = broadcast_batch(a, b)
    x = batched_triangular_solve(
        a, b, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return x, a


# --- Orthogonal factorisations


@register_lowering("linalg_qr.default")
def qr(ctx: Context, a: Array, mode: str = "reduced") -> Pair:
    q_like, r_like = ctx.out
    if a.size == 0:
        q = jnp.zeros(q_like.shape) if mode == "r" else identity(q_like.shape, a.dtype)
        return q, jnp.zeros(r_like.shape, a.dtype)
    if mode == "r":
        return jnp.zeros(q_like.shape, a.dtype), jnp.linalg.qr(a, mode="r")
    return lax.linalg.qr(a, full_matrices=mode == "complete")


@register_lowering("geqrf.default")
def geqrf(ctx: Context, a: Array) -> Pair:
    if a.size == 0:
        return a, jnp.zeros(ctx.out[1].shape, a.dtype)
    packed, tau = jnp.linalg.qr(a, mode="raw")
    return transpose(packed), tau


@register_lowering("linalg_householder_product.default")
def householder_product(a: Array, tau: Array) -> Array:
    if a.size == 0:
        return a
    if tau.shape[-1] == 0:
        return identity(a.shape, a.dtype)
    return lax.linalg.householder_product(a, tau)


@register_lowering("ormqr.default")
def ormqr(a: Array, tau: Array, other: Array, left: bool = True, transpose: bool = False) -> Array:
    if other.size == 0 or tau.shape[-1] == 0:
        return other
    return lax.linalg.ormqr(a, tau, other, left=left, transpose=transpose)


def _vectors_wanted(*outputs: int) -> Predicate:
    """Singular vectors and eigenvectors have no unique sign: XLA may find others than torch."""

    def reason(node: fx.Node) -> str | None:
        wanted = any(user.args[1] in outputs for user in node.users)
        return (
            (
                "eigenvectors and singular vectors are unique only up to a factor, and XLA's would "
                "differ from eager's"
            )
            if wanted
            else None
        )

    return reason


@register_lowering("_linalg_svd.default", when=_vectors_wanted(0, 2))
def svd(
    ctx: Context,
    a: Array,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[Array, Array, Array]:
    """NaN results, where torch raises, for a matrix that is not finite."""
    u_like, s_like, vh_like = ctx.out
    if a.size == 0:
        u, vh = (
            identity(o.shape, a.dtype) if compute_uv else jnp.zeros(o.shape, a.dtype)
            for o in (u_like, vh_like)
        )
        return u, jnp.zeros(s_like.shape), vh
    if not compute_uv:
        s = lax.linalg.svd(a, full_matrices=False, compute_uv=False)
        return jnp.zeros(u_like.shape, a.dtype), s, jnp.zeros(vh_like.shape, a.dtype)
    u, s, vh = lax.linalg.svd(a, full_matrices=full_matrices)
    return u, s, vh


# --- Eigenvalues


@register_lowering("_linalg_eigh.default", when=_vectors_wanted(1))
def eigh(ctx: Context, a: Array, UPLO: str = "L", compute_v: bool = True) -> Pair:
    """NaN results, where torch raises, for a matrix that is not finite."""
    values_like, vectors_like = ctx.out
    if a.size == 0:
        return jnp.zeros(values_like.shape), jnp.zeros(vectors_like.shape, a.dtype)
    vectors, values = lax.linalg.eigh(a, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values, (vectors if compute_v else jnp.zeros(vectors_like.shape, a.dtype))


def _on_cpu(ctx: Context) -> None:
    if ctx.options.platform != "cpu":
        raise ctx.refuse("XLA has a general eigenvalue solver for CPUs only")


@register_lowering("_linalg_eigvals.default")
def eigvals(ctx: Context, a: Array) -> Array:
    _on_cpu(ctx)
    if a.size == 0:
        return jnp.zeros(ctx.out.shape, ctx.out_dtype)
    return lax.linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]


# --- Functions of a matrix


@register_lowering("linalg_matrix_exp.default")
def matrix_exp(ctx: Context, a: Array) -> Array:
    """Computes in float64 where that is cheap: squaring doubles the error each time."""
    if a.size == 0:
        return a
    if ctx.options.platform == "tpu":
        a = widen(a)
    else:
        a = a.astype(jnp.complex128 if jnp.iscomplexobj(a) else jnp.float64)
    return jsl.expm(a, max_squarings=64)


@register_lowering("linalg_pinv.atol_rtol_tensor")
def pinv(
    a: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False
) -> Array:
    """Through the eigen- or singular values above `max(atol, rtol * largest)`."""
    if a.size == 0:
        return transpose(a)
    default = jnp.finfo(a.dtype).eps * max(a.shape[-2:])
    if rtol is None:
        rtol = jnp.asarray(default) if atol is None else jnp.where(atol > 0, 0.0, default)
    atol = jnp.zeros(()) if atol is None else atol
    if hermitian:
        u, values = lax.linalg.eigh(a, symmetrize_input=False)
        v = u
    else:
        u, values, vh = lax.linalg.svd(a, full_matrices=False)
        v = conjugate_transpose(vh)
    size = jnp.abs(values)
    cutoff = jnp.maximum(atol, rtol * jnp.max(size, -1)).astype(size.dtype)[..., None]
    keep = size > cutoff
    inverse = jnp.where(keep, 1 / jnp.where(keep, values, 1), 0).astype(a.dtype)
    return jnp.matmul(v * inverse[..., None, :], conjugate_transpose(u), precision="highest")


def _norm(x: Array, p: float) -> Array:
    """Returns the p-norm over the last axis; 0 where that is empty."""
    if x.shape[-1] == 0:
        return jnp.zeros(x.shape[:-1], x.dtype)
    return vector_norm(x, p, -1)


def _norm_slope(difference: Array, norm: Array, p: float) -> Array:
    """Returns the gradient of `_norm`, taken as 0 where two vectors coincide."""
    size, sign, norm = jnp.abs(difference), jnp.sign(difference), norm[..., None]
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return sign
    if math.isinf(p):
        return sign * (size == norm)
    safe = jnp.where(norm == 0, 1, norm)
    if p == 2:
        slope = difference / safe
    elif p < 1:
        slope = sign * jnp.where(size == 0, 0, jnp.power(size / safe, p - 1))
    else:
        slope = sign * jnp.power(size / safe, p - 1)
    return jnp.where(norm == 0, 0, slope)


def _differences(x: Array, y: Array) -> Array:
    return widen(x)[..., :, None, :] - widen(y)[..., None, :, :]


@register_lowering("dist.default")
def dist(x: Array, y: Array, p: float = 2) -> Array:
    return vector_norm(x - y, p)


@register_lowering("_cdist_forward.default")
def cdist(x1: Array, x2: Array, p: float, compute_mode: int | None) -> Array:
    return _norm(_differences(x1, x2), p)


@register_lowering("_cdist_backward.default")
def cdist_backward(grad: Array, x1: Array, x2: Array, p: float, cdist: Array) -> Array:
    return jnp.sum(grad[..., None] * _norm_slope(_differences(x1, x2), cdist, p), -2)


@register_lowering("_pdist_forward.default")
def pdist(x: Array, p: float = 2) -> Array:
    first, second = np.triu_indices(x.shape[0], 1)
    return _norm(x[first] - x[second], p)


@register_lowering("_pdist_backward.default")
def pdist_backward(grad: Array, x: Array, p: float, pdist: Array) -> Array:
    first, second = np.triu_indices(x.shape[0], 1)
    flow = grad[:, None] * _norm_slope(x[first] - x[second], pdist, p)
    return jnp.zeros_like(x).at[first].add(flow).at[second].add(-flow)
