"""Complex numbers: parts, construction and views."""

import jax.numpy as jnp
from jax import Array, lax

from dynamo_backends.xla.lowering.registry import Promotion, lowers, pointwise


@pointwise(
    "_conj.default",
    "conj_physical.default",
    "_conj_physical.default",
    "_conj_copy.default",
)
def conj(x: Array) -> Array:
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


pointwise("_neg_view.default", "_neg_view_copy.default")(lambda x: -x)
pointwise("resolve_conj.default", "resolve_neg.default")(lambda x: x)


@pointwise("angle.default", promote=Promotion.COMPLEX_TO_FLOAT)
def angle(x: Array) -> Array:
    """0 or pi for real numbers, NaN for NaN."""
    if jnp.iscomplexobj(x):
        return jnp.arctan2(jnp.imag(x), jnp.real(x))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float32)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0).astype(x.dtype))


lowers("real.default")(lambda x: jnp.real(x))
lowers("imag.default")(lambda x: jnp.imag(x))


@lowers("complex.default")
def complex_(real: Array, imag: Array) -> Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@lowers("polar.default")
def polar(abs: Array, angle: Array) -> Array:
    return complex_(abs * jnp.cos(angle), abs * jnp.sin(angle))


@lowers("view_as_real.default", "view_as_real_copy.default")
def view_as_real(x: Array) -> Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@lowers("view_as_complex.default", "view_as_complex_copy.default")
def view_as_complex(x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])
