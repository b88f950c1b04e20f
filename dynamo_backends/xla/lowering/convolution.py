"""Convolution and its gradients; `convolution_programs` chooses the XLA program."""

from collections.abc import Sequence

import jax

from dynamo_backends.xla.lowering import convolution_programs as programs
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.layouts import batched_channels_last, unbatched
from dynamo_backends.xla.lowering.registry import Layout, lowers
from dynamo_backends.xla.lowering.values import Value, logical


def _full(values: Sequence[int], spatial: int) -> tuple[int, ...]:
    return tuple(values) * spatial if len(values) == 1 else tuple(values)


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
    weight = logical(weight)
    spatial = weight.ndim - 2
    x, batched = batched_channels_last(input, spatial)
    common = {
        "stride": _full(stride, spatial),
        "padding": _full(padding, spatial),
        "dilation": _full(dilation, spatial),
        "groups": groups,
        "platform": ctx.options.platform,
        "precision": ctx.precision,
    }
    if transposed:
        out = programs.convolve_transposed(
            x, weight, output_padding=_full(output_padding, spatial), **common
        )
    else:
        out = programs.convolve(x, weight, **common)
    if bias is not None:
        out = out + bias.astype(out.dtype)
    return unbatched(ctx, input, out.astype(ctx.out_dtype), batched)
