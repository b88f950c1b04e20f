"""Distances between vectors."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamo_backends.xla.lowering.reduction import vector_norm, widen
from dynamo_backends.xla.lowering.registry import lowers


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


@lowers("dist.default")
def dist(x: Array, y: Array, p: float = 2) -> Array:
    return vector_norm(x - y, p)


@lowers("_cdist_forward.default")
def cdist(x1: Array, x2: Array, p: float, compute_mode: int | None) -> Array:
    return _norm(_differences(x1, x2), p)


@lowers("_cdist_backward.default")
def cdist_backward(grad: Array, x1: Array, x2: Array, p: float, cdist: Array) -> Array:
    return jnp.sum(grad[..., None] * _norm_slope(_differences(x1, x2), cdist, p), -2)


@lowers("_pdist_forward.default")
def pdist(x: Array, p: float = 2) -> Array:
    first, second = np.triu_indices(x.shape[0], 1)
    return _norm(x[first] - x[second], p)


@lowers("_pdist_backward.default")
def pdist_backward(grad: Array, x: Array, p: float, pdist: Array) -> Array:
    first, second = np.triu_indices(x.shape[0], 1)
    flow = grad[:, None] * _norm_slope(x[first] - x[second], pdist, p)
    return jnp.zeros_like(x).at[first].add(flow).at[second].add(-flow)
