"""Special functions of mathematical physics and statistics, and orthogonal polynomials.

XLA's float32 versions lose up to five digits (`lgamma`, `digamma`, `erfinv`, ...), so float32 and
narrower operands are computed in float64 and rounded once; on TPU, where float64 is emulated and
slow, in float32. `erf` stays in float32: it is accurate there, and GELU is made of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import jax.scipy.special as jsp
from jax import Array, lax

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Predicate, Promotion, register_pointwise

_ALL = slice(0, None)


def register_special_function(
    *names: str, operands: slice = _ALL, when: Predicate | None = None
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Returns a decorator that registers a special function as a lowering.

    Args:
        names: As for `lowers`.
        operands: Which positional arguments are the function's operands.
        when: As for `lowers`.
    """

    def register(fn: Callable[..., Array]) -> Callable[..., Array]:
        def lowering(ctx: Context, *args: Array) -> Array:
            wide = [
                a.astype(jnp.float64) if _is_narrow(a) and ctx.options.platform != "tpu" else a
                for a in args
            ]
            return fn(*wide)

        names_ = [n if "." in n else f"{n}.default" for n in names]
        register_pointwise(*names_, promote=Promotion.INT_TO_FLOAT, operands=operands, when=when)(
            lowering
        )
        return fn

    return register


def _is_narrow(x: object) -> bool:
    return isinstance(x, Array) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 8


register_pointwise("erf.default", promote=Promotion.INT_TO_FLOAT)(lax.erf)
register_special_function("erfc")(lax.erfc)
register_special_function("erfinv")(lax.erf_inv)
register_special_function("i0")(jsp.i0)
register_special_function("igamma")(lambda a, x: lax.igamma(*jnp.broadcast_arrays(a, x)))
register_special_function("igammac")(lambda a, x: lax.igammac(*jnp.broadcast_arrays(a, x)))
register_special_function("special_i0e")(jsp.i0e)
register_special_function("special_i1")(jsp.i1)
register_special_function("special_i1e")(jsp.i1e)
register_special_function("special_ndtri")(jsp.ndtri)
register_special_function("lgamma")(lax.lgamma)


@register_special_function("special_erfcx")
def erfcx(x: Array) -> Array:
    """`exp(x²) erfc(x)`; where `erfc` underflows, by its asymptotic series (DLMF 7.12.1)."""
    z = -0.5 / jnp.square(jnp.maximum(x, 20))
    series = jnp.ones_like(x)
    for k in range(15, 0, -2):
        series = 1 + k * z * series
    far = series / (x * math.sqrt(math.pi))
    return jnp.where(x > 20, far, jsp.erfcx(jnp.minimum(x, 20)))


@register_special_function("digamma")
def digamma(x: Array) -> Array:
    """Infinite with the opposite sign at ±0 and NaN at the other poles."""
    at_zero = jnp.copysign(jnp.inf, -x).astype(x.dtype)
    pole = (x < 0) & (x == jnp.floor(x))
    return jnp.where(x == 0, at_zero, jnp.where(pole, jnp.nan, lax.digamma(x)))


# Denominators (2k)! / B_2k of the Euler-Maclaurin sum.
_EULER_MACLAURIN = (
    12.0,
    -720.0,
    30240.0,
    -1209600.0,
    47900160.0,
    -1.8924375803183791606e9,
    7.47242496e10,
    -2.950130727918164224e12,
    1.1646782814350067249e14,
    -4.5979787224074726105e15,
    1.8152105401943546773e17,
    -7.1661652561756670113e18,
)


@register_special_function("special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar")
def zeta(x: Array, q: Array) -> Array:
    """Hurwitz' zeta function, `zeta.c` of Cephes, also left of the poles where XLA's is wrong."""
    x, q = jnp.broadcast_arrays(x, q)
    undefined = (x < 1) | ((q <= 0) & (x != jnp.floor(x))) | ~jnp.isfinite(x) | ~jnp.isfinite(q)
    pole = (x == 1) | ((x > 1) & (q <= 0) & (q == jnp.floor(q)))
    a0 = jnp.where(undefined | pole, 10, q)

    def more(state: tuple[Array, Array, Array]) -> Array:
        i, a, _ = state
        return (i < 9) | (a <= 9)

    def add_term(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, a, total = state
        following = a + 1
        keep = more(state)
        return (
            i + 1,
            jnp.where(keep, following, a),
            jnp.where(keep, total + jnp.power(following, -x), total),
        )

    start = (jnp.asarray(0, jnp.int32), a0, jnp.power(a0, -x))
    _, w, total = lax.while_loop(lambda s: jnp.any(more(s)), add_term, start)
    power = jnp.power(w, -x)
    total = total + power * w / (x - 1) - 0.5 * power
    rising = x
    for k, denominator in enumerate(_EULER_MACLAURIN):
        power = power / w
        total = total + rising * power / denominator
        rising = rising * (x + 2 * k + 1) * (x + 2 * k + 2)
        power = power / w
    # The tail underflows into 0 * inf for large x, where the first term is all there is.
    total = jnp.where(jnp.isnan(total), jnp.power(a0, -x), total)
    return jnp.where(pole, jnp.inf, jnp.where(undefined, jnp.nan, total))


@register_special_function("polygamma", operands=slice(1, 2))
def polygamma(n: int, x: Array) -> Array:
    """`(-1)^(n+1) n! zeta(n+1, x)`, as `at::native::calc_polygamma`."""
    if n == 0:
        return digamma(x)
    order = jnp.full_like(x, n)
    sign = 1.0 if n % 2 else -1.0
    return sign * jnp.exp(lax.lgamma(order + 1)) * zeta(order + 1, x)


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
    register_special_function(*_names(f"chebyshev_polynomial_{_kind}"))(_polynomial)
    register_special_function(*_names(f"shifted_chebyshev_polynomial_{_kind}"))(
        _shifted(_polynomial)
    )


def _simple(
    x: Array, n: Array, first: Callable[[Array], Array], step: Callable[..., Array]
) -> Array:
    degree = _degree(n)
    x, degree = jnp.broadcast_arrays(x, degree)
    known = jnp.zeros(x.shape, jnp.bool_)
    return _recur(degree, first(x), lambda k, last, before: step(k, x, last, before), known)


@register_special_function(*_names("legendre_polynomial_p"))
def legendre(x: Array, n: Array) -> Array:
    def step(k: Array, x: Array, last: Array, before: Array) -> Array:
        return ((2 * k - 1) * x * last - (k - 1) * before) / k

    return _simple(x, n, lambda x: x, step)


@register_special_function(*_names("laguerre_polynomial_l"))
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


@register_pointwise(*_names("hermite_polynomial_h"), promote=Promotion.INT_TO_FLOAT)
def hermite_h(ctx: Context, x: Array, n: Array) -> Array:
    return _hermite(ctx, x, n, 2)


@register_pointwise(*_names("hermite_polynomial_he"), promote=Promotion.INT_TO_FLOAT)
def hermite_he(ctx: Context, x: Array, n: Array) -> Array:
    return _hermite(ctx, x, n, 1)
