"""Orthogonal polynomials of a degree that is itself a tensor.

A three-term recurrence runs until the highest degree; inside [-1, 1] Chebyshev polynomials of high
degree come from their trigonometric form, as in ATen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Promotion, pointwise
from dynamo_backends.xla.lowering.special import special

_Step = Callable[[Array, Array, Array], Array]


def _names(name: str) -> tuple[str, ...]:
    return tuple(f"special_{name}.{o}" for o in ("default", "x_scalar", "n_scalar"))


def _degree(n: Array) -> Array:
    """Degrees truncated to integers; NaN and infinite ones count as negative."""
    return jnp.where(jnp.isfinite(n), jnp.clip(n, -1, 2.0**40), -1).astype(jnp.int64)


def _recur(n: Array, first: Array, step: _Step, known: Array) -> Array:
    """P_n from P_0 = 1, P_1 = `first` and `P_k = step(k, P_{k-1}, P_{k-2})`.

    Elements stop at their degree, at NaN, or at once where their value is `known` otherwise.
    """

    def busy(state: tuple[Array, Array, Array]) -> Array:
        k, _, last = state
        return (k <= n) & ~jnp.isnan(last) & ~known

    def advance(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, before, last = state
        active = busy(state)
        following = step(k.astype(last.dtype), last, before)
        return (
            k + 1,
            jnp.where(active, last, before),
            jnp.where(active, following, last),
        )

    start = (jnp.asarray(2, jnp.int64), jnp.ones_like(first), first)
    last = lax.while_loop(lambda s: jnp.any(busy(s)), advance, start)[2]
    return jnp.where(n < 0, 0, jnp.where(n == 0, 1, last))


@dataclass(frozen=True)
class _Chebyshev:
    """One of the four kinds, as a function of n and the angle t = acos(x)."""

    first: Callable[[Array], Array]
    trigonometric: Callable[[Array, Array], Array]
    at_one: Callable[[Array], Array]
    at_minus_one: Callable[[Array], Array]

    def __call__(self, x: Array, n: Array) -> Array:
        degree = _degree(n)
        x, degree = jnp.broadcast_arrays(x, degree)
        real_degree = degree.astype(x.dtype)
        inside = (degree > 8) & (jnp.abs(x) < 1)
        at_end = jnp.abs(x) == 1
        angle = jnp.arccos(jnp.clip(x, -1, 1))
        value = _recur(
            degree,
            self.first(x),
            lambda _, last, before: 2 * x * last - before,
            inside | at_end,
        )
        value = jnp.where(inside, self.trigonometric(real_degree, angle), value)
        sign = jnp.where(degree % 2 == 0, 1.0, -1.0).astype(x.dtype)
        end = jnp.where(x > 0, self.at_one(real_degree), sign * self.at_minus_one(real_degree))
        return jnp.where(at_end & (degree >= 0), end, value)


_CHEBYSHEV = {
    "t": _Chebyshev(lambda x: x, lambda n, t: jnp.cos(n * t), jnp.ones_like, jnp.ones_like),
    "u": _Chebyshev(
        lambda x: 2 * x,
        lambda n, t: jnp.sin((n + 1) * t) / jnp.sin(t),
        lambda n: n + 1,
        lambda n: n + 1,
    ),
    "v": _Chebyshev(
        lambda x: 2 * x - 1,
        lambda n, t: jnp.cos((n + 0.5) * t) / jnp.cos(t / 2),
        jnp.ones_like,
        lambda n: 2 * n + 1,
    ),
    "w": _Chebyshev(
        lambda x: 2 * x + 1,
        lambda n, t: jnp.sin((n + 0.5) * t) / jnp.sin(t / 2),
        lambda n: 2 * n + 1,
        jnp.ones_like,
    ),
}


def _shifted(polynomial: _Chebyshev) -> Callable[[Array, Array], Array]:
    return lambda x, n: polynomial(2 * x - 1, n)


for _kind, _polynomial in _CHEBYSHEV.items():
    special(*_names(f"chebyshev_polynomial_{_kind}"))(_polynomial)
    special(*_names(f"shifted_chebyshev_polynomial_{_kind}"))(_shifted(_polynomial))


def _simple(
    x: Array, n: Array, first: Callable[[Array], Array], step: Callable[..., Array]
) -> Array:
    degree = _degree(n)
    x, degree = jnp.broadcast_arrays(x, degree)
    known = jnp.zeros(x.shape, jnp.bool_)
    return _recur(degree, first(x), lambda k, last, before: step(k, x, last, before), known)


@special(*_names("legendre_polynomial_p"))
def legendre(x: Array, n: Array) -> Array:
    def step(k: Array, x: Array, last: Array, before: Array) -> Array:
        return ((2 * k - 1) * x * last - (k - 1) * before) / k

    return _simple(x, n, lambda x: x, step)


@special(*_names("laguerre_polynomial_l"))
def laguerre(x: Array, n: Array) -> Array:
    def step(k: Array, x: Array, last: Array, before: Array) -> Array:
        return ((2 * k - 1 - x) * last - (k - 1) * before) / k

    return _simple(x, n, lambda x: 1 - x, step)


_HERMITE_LIMIT = {
    4: 128,
    8: 512,
}  # degrees beyond these are NaN in torch, by size of the dtype


def _hermite(ctx: Context, x: Array, n: Array, factor: int) -> Array:
    """H_n for `factor` 2 (physicists'), He_n for 1 (probabilists')."""
    limit = _HERMITE_LIMIT[x.dtype.itemsize]
    if ctx.options.platform != "tpu":
        x = x.astype(jnp.float64)

    def step(k: Array, x: Array, last: Array, before: Array) -> Array:
        return factor * (x * last - (k - 1) * before)

    value = _simple(x, jnp.where(n > limit, 0, n), lambda x: factor * x, step)
    return jnp.where(jnp.trunc(n) > limit, jnp.nan, value)


@pointwise(*_names("hermite_polynomial_h"), promote=Promotion.INT_TO_FLOAT)
def hermite_h(ctx: Context, x: Array, n: Array) -> Array:
    return _hermite(ctx, x, n, 2)


@pointwise(*_names("hermite_polynomial_he"), promote=Promotion.INT_TO_FLOAT)
def hermite_he(ctx: Context, x: Array, n: Array) -> Array:
    return _hermite(ctx, x, n, 1)
