"""Matrix products and the operators built directly on them.

float16 and bfloat16 products accumulate in float32 and are rounded once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import register_lowering
from dynamo_backends.xla.lowering.values import scalar

Dims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]

_MATRIX: Dims = (((1,), (0,)), ((), ()))
_BATCH: Dims = (((2,), (1,)), ((0,), (0,)))
_SUM_OF_BATCH: Dims = (((0, 2), (0, 1)), ((), ()))
_VECTORS: Dims = (((0,), (0,)), ((), ()))


def contract(ctx: Context, x: jax.Array, y: jax.Array, dims: Dims) -> jax.Array:
    """`lax.dot_general` in the precision asked for; the result has the accumulation dtype."""
    return lax.dot_general(
        x,
        y,
        dims,
        precision=ctx.precision,
        preferred_element_type=accumulation_dtype(x.dtype),
    )


def _combine(self: jax.Array, product: jax.Array, beta: Any, alpha: Any) -> jax.Array:
    """`beta * self + alpha * product`; with beta 0, NaNs of `self` do not count."""
    if alpha != 1:
        product = product * scalar(alpha, product.dtype)
    if beta == 0:
        return product
    self = self.astype(product.dtype)
    return product + (self if beta == 1 else self * scalar(beta, product.dtype))


def _product(dims: Dims) -> Callable[..., jax.Array]:
    def lowering(
        ctx: Context, self: jax.Array, other: jax.Array, out_dtype: torch.dtype | None = None
    ) -> jax.Array:
        return contract(ctx, self, other, dims)

    return lowering


def _sum_with_product(dims: Dims) -> Callable[..., jax.Array]:
    def lowering(
        ctx: Context,
        self: jax.Array,
        first: jax.Array,
        second: jax.Array,
        out_dtype: torch.dtype | None = None,
        *,
        beta: Any = 1,
        alpha: Any = 1,
    ) -> jax.Array:
        return _combine(self, contract(ctx, first, second, dims), beta, alpha)

    return lowering


register_lowering("mm.default", "mm.dtype", "mv.default")(_product(_MATRIX))
register_lowering("bmm.default", "bmm.dtype")(_product(_BATCH))
register_lowering("dot.default")(_product(_VECTORS))
register_lowering("addmm.default", "addmm.dtype", "addmv.default")(_sum_with_product(_MATRIX))
register_lowering("baddbmm.default", "baddbmm.dtype")(_sum_with_product(_BATCH))
register_lowering("addbmm.default")(_sum_with_product(_SUM_OF_BATCH))


@register_lowering("_int_mm.default")
def int_mm(self: jax.Array, mat2: jax.Array) -> jax.Array:
    return lax.dot_general(self, mat2, _MATRIX, preferred_element_type=jnp.int32)


@register_lowering("_addmm_activation.default")
def addmm_activation(
    ctx: Context,
    self: jax.Array,
    mat1: jax.Array,
    mat2: jax.Array,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    use_gelu: bool = False,
) -> jax.Array:
    total = _combine(self, contract(ctx, mat1, mat2, _MATRIX), beta, alpha)
    if not use_gelu:
        return jnp.maximum(total, 0)
    return jax.nn.gelu(total, approximate=ctx.options.platform != "cpu")


@register_lowering("vdot.default")
def vdot(ctx: Context, self: jax.Array, other: jax.Array) -> jax.Array:
    return contract(ctx, jnp.conj(self), other, _VECTORS)


@register_lowering("linear.default")
def linear(
    ctx: Context, input: jax.Array, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    product = contract(ctx, input, weight, (((input.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return product if bias is None else product + bias.astype(product.dtype)


@register_lowering("_trilinear.default")
def trilinear(
    ctx: Context,
    i1: jax.Array,
    i2: jax.Array,
    i3: jax.Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> jax.Array:
    """Returns the product of three tensors, each first given the dimensions `expand…`, summed."""
    ndim = i1.ndim + len(expand1)
    letters = [chr(ord("a") + d) for d in range(ndim)]

    def axes(expanded: Sequence[int]) -> str:
        return "".join(c for d, c in enumerate(letters) if d not in expanded)

    dtype = accumulation_dtype(i1.dtype)
    return jnp.einsum(
        f"{axes(expand1)},{axes(expand2)},{axes(expand3)}->{axes(sumdim)}",
        i1.astype(dtype),
        i2.astype(dtype),
        i3.astype(dtype),
        precision=ctx.precision,
    )
