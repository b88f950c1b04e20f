"""Convolution and its gradients; `convolution_programs` chooses the XLA program."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering import convolution_programs as programs
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.convolution_shape import Settings
from dynamo_backends.xla.lowering.layouts import batched_channels_last, unbatched
from dynamo_backends.xla.lowering.registry import Layout, lowers
from dynamo_backends.xla.lowering.values import Value, logical


def _full(values: Sequence[int], spatial: int) -> tuple[int, ...]:
    return tuple(values) * spatial if len(values) == 1 else tuple(values)


def _settings(
    ctx: Context,
    spatial: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Settings:
    return Settings(
        stride=_full(stride, spatial),
        padding=_full(padding, spatial),
        dilation=_full(dilation, spatial),
        groups=groups,
        platform="partitioned" if ctx.options.partitioned else ctx.options.platform,
        precision=ctx.convolution_precision,
    )


@lowers("convolution.default", "_convolution.default", layout=Layout.RAW)
def convolution(
    ctx: Context,
    input: Value,
    weight: Value,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *flags: bool,
) -> Value:
    w = logical(weight)
    spatial = w.ndim - 2
    x, batched = batched_channels_last(input, spatial)
    common = _settings(ctx, spatial, stride, padding, dilation, groups)
    if transposed:
        out = programs.convolve_transposed(
            x, w, output_padding=_full(output_padding, spatial), **common
        )
    else:
        out = programs.convolve(x, w, **common)
    if bias is not None:
        out = out + bias.astype(out.dtype)
    return unbatched(ctx, input, out.astype(ctx.out_dtype), batched)


@lowers("convolution_backward.default", layout=Layout.RAW)
def convolution_backward(
    ctx: Context,
    grad_output: Value,
    input: Value,
    weight: Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, jax.Array | None, jax.Array | None]:
    """Gradients of input, weight and bias, each only if `output_mask` asks for it."""
    w = logical(weight)
    spatial = w.ndim - 2
    dy, batched = batched_channels_last(grad_output, spatial)
    x, _ = batched_channels_last(input, spatial)
    common = _settings(ctx, spatial, stride, padding, dilation, groups)
    gradients = _transposed_gradients if transposed else _plain_gradients
    grad_input, grad_weight = gradients(dy, x, w, common, output_mask)
    grad_bias = None
    if output_mask[2]:
        grad_bias = jnp.sum(dy, tuple(range(spatial + 1)), dtype=accumulation_dtype(dy.dtype))
    if grad_input is None:
        return None, grad_weight, grad_bias
    return unbatched(ctx, input, grad_input, batched), grad_weight, grad_bias


def _plain_gradients(
    dy: jax.Array, x: jax.Array, w: jax.Array, common: Settings, mask: Sequence[bool]
) -> tuple[jax.Array | None, jax.Array | None]:
    grad_input = programs.grad_input(dy, w, x.shape[1:-1], **common) if mask[0] else None
    grad_weight = programs.grad_weight(x, dy, w.shape[2:], **common) if mask[1] else None
    return grad_input, grad_weight


def _transposed_gradients(
    dy: jax.Array, x: jax.Array, w: jax.Array, common: Settings, mask: Sequence[bool]
) -> tuple[jax.Array | None, jax.Array | None]:
    """A transposed convolution is the input's gradient of a plain one with the same weight.

    Output padding of a stride or more lets that plain convolution reach past the input's end.
    """
    grad_input = grad_weight = None
    size = x.shape[1:-1]
    if mask[0]:
        grad_input = programs.convolve(dy, w, **common)
        grad_input = grad_input[(slice(None), *(slice(0, n) for n in size))]
    if mask[1]:
        reach = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1 - m
            for n, p, d, k, s, m in zip(
                dy.shape[1:-1],
                common["padding"],
                common["dilation"],
                w.shape[2:],
                common["stride"],
                size,
                strict=True,
            )
        ]
        x = jnp.pad(x, [(0, 0), *((0, r) for r in reach), (0, 0)])
        grad_weight = programs.grad_weight(dy, x, w.shape[2:], **common)
    return grad_input, grad_weight
