"""Special functions of mathematical physics and statistics.

XLA's float32 versions lose up to five digits (`lgamma`, `digamma`, `erfinv`, ...), so float32 and
narrower operands are computed in float64 and rounded once; on TPU, where float64 is emulated and
slow, in float32. `erf` stays in float32: it is accurate there, and GELU is made of it.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import jax.scipy.special as jsp
from jax import Array, lax

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Predicate, Promotion, pointwise

_ALL = slice(0, None)


def special(
    *names: str, operands: slice = _ALL, when: Predicate | None = None
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Registers a special function, which is handed float64 operands where that is cheap.

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
        pointwise(*names_, promote=Promotion.INT_TO_FLOAT, operands=operands, when=when)(lowering)
        return fn

    return register


def _is_narrow(x: object) -> bool:
    return isinstance(x, Array) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 8


pointwise("erf.default", promote=Promotion.INT_TO_FLOAT)(lax.erf)
special("erfc")(lax.erfc)
special("erfinv")(lax.erf_inv)
special("i0")(jsp.i0)
special("igamma")(lambda a, x: lax.igamma(*jnp.broadcast_arrays(a, x)))
special("igammac")(lambda a, x: lax.igammac(*jnp.broadcast_arrays(a, x)))
special("special_i0e")(jsp.i0e)
special("special_i1")(jsp.i1)
special("special_i1e")(jsp.i1e)
special("special_ndtri")(jsp.ndtri)
special("lgamma")(lax.lgamma)


@special("special_erfcx")
def erfcx(x: Array) -> Array:
    """`exp(x²) erfc(x)`; where `erfc` underflows, by its asymptotic series (DLMF 7.12.1)."""
    z = -0.5 / jnp.square(jnp.maximum(x, 20))
    series = jnp.ones_like(x)
    for k in range(15, 0, -2):
        series = 1 + k * z * series
    far = series / (x * math.sqrt(math.pi))
    return jnp.where(x > 20, far, jsp.erfcx(jnp.minimum(x, 20)))


@special("digamma")
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


@special("special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar")
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


@special("polygamma", operands=slice(1, 2))
def polygamma(n: int, x: Array) -> Array:
    """`(-1)^(n+1) n! zeta(n+1, x)`, as `at::native::calc_polygamma`."""
    if n == 0:
        return digamma(x)
    order = jnp.full_like(x, n)
    sign = 1.0 if n % 2 else -1.0
    return sign * jnp.exp(lax.lgamma(order + 1)) * zeta(order + 1, x)
