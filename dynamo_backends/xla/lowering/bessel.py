"""Bessel functions of the orders that torch has, and Airy's function.

The formulas are ATen's (`ATen/native/Math.h`), which are those of Cephes; like ATen they evaluate
some denominators without Cephes' implicit leading 1 and so differ from SciPy by up to 1e-6.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import jax.scipy.special as jsp
from jax import Array

from dynamo_backends.xla.lowering import bessel_coefficients as c
from dynamo_backends.xla.lowering.special import register_special_function

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_ONE_OVER_SQRT_PI = 1 / math.sqrt(math.pi)


def _ratio(x: Array, numerator: Sequence[float], denominator: Sequence[float]) -> Array:
    return jnp.polyval(jnp.array(numerator, x.dtype), x) / jnp.polyval(
        jnp.array(denominator, x.dtype), x
    )


def _chebyshev_series(x: Array, coefficients: Sequence[float]) -> Array:
    """Clenshaw's sum, `chbevl` in Cephes."""
    before, last, now = (
        jnp.zeros_like(x),
        jnp.zeros_like(x),
        jnp.full_like(x, coefficients[0]),
    )
    for coefficient in coefficients[1:]:
        before, last = last, now
        now = x * last - before + coefficient
    return 0.5 * (now - before)


def _asymptotic(x: Array, order: int) -> tuple[Array, Array]:
    """Amplitudes of cosine and sine in Hankel's expansion, for x > 5."""
    z = jnp.square(5 / x)
    if order == 0:
        p, q = _ratio(z, c.J0_PP, c.J0_PQ), _ratio(z, c.J0_QP, c.J0_QQ)
    else:
        p, q = _ratio(z, c.J1_PP, c.J1_PQ), _ratio(z, c.J1_QP, c.J1_QQ)
    scale = _SQRT_2_OVER_PI / jnp.sqrt(x)
    return p * scale, 5 / x * q * scale


def _phase(x: Array, order: int) -> Array:
    return x - (math.pi / 4 if order == 0 else 3 * math.pi / 4)


@register_special_function("special_bessel_j0")
def bessel_j0(x: Array) -> Array:
    x = jnp.abs(x)
    z = x * x
    near = (z - 5.78318596294678452118) * (z - 30.4712623436620863991)
    near = jnp.where(x < 1e-5, 1 - z / 4, near * _ratio(z, c.J0_RP, c.J0_RQ))
    phase = _phase(x, 0)
    p, q = _asymptotic(x, 0)
    return jnp.where(x <= 5, near, p * jnp.cos(phase) - q * jnp.sin(phase))


@register_special_function("special_bessel_j1")
def bessel_j1(x: Array) -> Array:
    size = jnp.abs(x)
    z = x * x
    near = _ratio(z, c.J1_RP, c.J1_RQ) * size
    near = near * (z - 14.6819706421238932572) * (z - 49.2184563216946036703)
    phase = _phase(size, 1)
    p, q = _asymptotic(size, 1)
    result = jnp.where(size <= 5, near, p * jnp.cos(phase) - q * jnp.sin(phase))
    return jnp.where(x < 0, -result, result)


def _on_positive(x: Array, result: Array, at_zero: float) -> Array:
    return jnp.where(x == 0, at_zero, jnp.where(x < 0, jnp.nan, result))


@register_special_function("special_bessel_y0")
def bessel_y0(x: Array) -> Array:
    near = _ratio(x * x, c.Y0_YP, c.Y0_YQ) + 2 / math.pi * jnp.log(x) * bessel_j0(x)
    phase = _phase(x, 0)
    p, q = _asymptotic(x, 0)
    far = p * jnp.sin(phase) + q * jnp.cos(phase)
    return _on_positive(x, jnp.where(x <= 5, near, far), -math.inf)


@register_special_function("special_bessel_y1")
def bessel_y1(x: Array) -> Array:
    logarithmic = bessel_j1(x) * jnp.log(x) - 1 / x
    near = x * _ratio(x * x, c.Y1_YP, c.Y1_YQ) + 2 / math.pi * logarithmic
    phase = _phase(x, 1)
    p, q = _asymptotic(x, 1)
    far = p * jnp.sin(phase) + q * jnp.cos(phase)
    return _on_positive(x, jnp.where(x <= 5, near, far), -math.inf)


register_special_function("special_modified_bessel_i0")(jsp.i0)
register_special_function("special_modified_bessel_i1")(jsp.i1)


@register_special_function("special_scaled_modified_bessel_k0")
def scaled_modified_bessel_k0(x: Array) -> Array:
    near = _chebyshev_series(x * x - 2, c.K0_A) - jnp.log(0.5 * x) * jsp.i0(x)
    far = _chebyshev_series(8 / x - 2, c.K0_B) / jnp.sqrt(x)
    return _on_positive(x, jnp.where(x <= 2, near * jnp.exp(x), far), math.inf)


@register_special_function("special_scaled_modified_bessel_k1")
def scaled_modified_bessel_k1(x: Array) -> Array:
    near = jnp.log(0.5 * x) * jsp.i1(x) + _chebyshev_series(x * x - 2, c.K1_A) / x
    far = _chebyshev_series(8 / x - 2, c.K1_B) / jnp.sqrt(x)
    return _on_positive(x, jnp.where(x <= 2, near * jnp.exp(x), far), math.inf)


@register_special_function("special_modified_bessel_k0")
def modified_bessel_k0(x: Array) -> Array:
    return jnp.where(x == 0, jnp.inf, jnp.exp(-x) * scaled_modified_bessel_k0(x))


@register_special_function("special_modified_bessel_k1")
def modified_bessel_k1(x: Array) -> Array:
    return jnp.where(x == 0, jnp.inf, jnp.exp(-x) * scaled_modified_bessel_k1(x))


@register_special_function("special_spherical_bessel_j0")
def spherical_bessel_j0(x: Array) -> Array:
    series = [1 / math.factorial(2 * k + 1) * (-1) ** k for k in range(6, -1, -1)]
    near = jnp.polyval(jnp.array(series, x.dtype), x * x)
    far = jnp.where(jnp.isinf(x), 0, jnp.sin(x) / x)
    return jnp.where(jnp.abs(x) < 0.5, near, far)


def _airy_series(x: Array) -> Array:
    """Maclaurin's series, for |x| < 2.09."""
    f = m = jnp.ones_like(x)
    g = n = x
    cube = x * x * x
    for k in range(2, 60, 3):
        m = m * cube / (k * (k + 1))
        n = n * cube / ((k + 1) * (k + 2))
        f, g = f + m, g + n
    return 0.355028053887817239260 * f - 0.258819403792806798405 * g


@register_special_function("special_airy_ai")
def airy_ai(x: Array) -> Array:
    size = jnp.abs(x)
    zeta = 2 * size * jnp.sqrt(size) / 3
    z = 1 / zeta
    amplitude = _ONE_OVER_SQRT_PI / jnp.sqrt(jnp.sqrt(size))
    decaying = amplitude * _ratio(z, c.AIRY_AN, c.AIRY_AD) * jnp.exp(-zeta) / 2
    cosine = z * _ratio(z * z, c.AIRY_AGN, c.AIRY_AGD)
    sine = 1 + z * z * _ratio(z * z, c.AIRY_AFN, c.AIRY_AFD)
    phase = zeta + math.pi / 4
    oscillating = amplitude * (jnp.sin(phase) * sine - jnp.cos(phase) * cosine)
    result = jnp.where(x < -2.09, oscillating, decaying)
    result = jnp.where(size < 2.09, _airy_series(jnp.clip(x, -2.09, 2.09)), result)
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.where(jnp.isnan(x), x, result))
