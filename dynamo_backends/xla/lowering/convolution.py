"""Convolution and its gradients; `convolution_programs` chooses the XLA program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering import convolution_nhwc as programs
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.convolution_shape import ConvolutionParams
from dynamo_backends.xla.lowering.registry import Layout, register_lowering
from dynamo_backends.xla.lowering.values import (
    Value,
    batched_channels_last,
    to_logical_array,
    unbatched,
)


def shard_map_over_batch(
    grid: Mesh,
    program: Callable[..., jax.Array],
    split: Sequence[jax.Array],
    whole: Sequence[jax.Array] = (),
    *,
    is_sum: bool = False,
) -> jax.Array:
    """Runs a function under `shard_map` with the batch dimension split over devices.

    Args:
        grid: The devices; all of them together have the batch once.
        program: Is traced for one device.
        split: Its first arguments: arrays of which each device has a part of the first dimension,
            which the number of devices divides.
        whole: Its other arguments, which each device has whole.
        is_sum: Devices' results are added; otherwise they are parts of the first dimension.
    """
    axes = grid.axis_names
    rows, all_of_it = PartitionSpec(axes), PartitionSpec()

    def on_a_device(*arrays: jax.Array) -> Any:
        result = program(*arrays)
        return jax.lax.psum(result, axes) if is_sum else result

    spread = jax.shard_map(
        on_a_device,
        mesh=grid,
        in_specs=(rows,) * len(split) + (all_of_it,) * len(whole),
        out_specs=all_of_it if is_sum else rows,
        check_vma=False,
    )
    result: jax.Array = spread(*split, *whole)
    return result


def _full(values: Sequence[int], spatial: int) -> tuple[int, ...]:
    return tuple(values) * spatial if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class _Programs:
    """`convolution_programs` for one call, on each device's part of the batch where there are any.

    Attributes:
        settings: Settings of the convolution.
        grid: Devices that share the batch; None: the program is not split by hand.
    """

    settings: ConvolutionParams
    grid: Any = None

    def convolve(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Computes the convolution."""
        return self._on_parts(lambda x, w: programs.convolve(x, w, **self.settings), [x], w)

    def convolve_transposed(
        self, x: jax.Array, w: jax.Array, output_padding: Sequence[int]
    ) -> jax.Array:
        """Computes the transposed convolution."""

        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            return programs.convolve_transposed(
                x, w, output_padding=output_padding, **self.settings
            )

        return self._on_parts(run, [x], w)

    def grad_input(self, dy: jax.Array, w: jax.Array, size: Sequence[int]) -> jax.Array:
        """Returns the gradient of the input, which has a spatial size."""
        return self._on_parts(
            lambda dy, w: programs.grad_input(dy, w, size, **self.settings), [dy], w
        )

    def grad_weight(self, x: jax.Array, dy: jax.Array, kernel: Sequence[int]) -> jax.Array:
        """Returns the gradient of the weight, which has a spatial size: the sum over the batch."""
        return self._on_parts(
            lambda x, dy: programs.grad_weight(x, dy, kernel, **self.settings), [x, dy]
        )

    def _on_parts(
        self, program: Callable[..., jax.Array], batch: Sequence[jax.Array], *whole: jax.Array
    ) -> jax.Array:
        if self.grid is None:
            return program(*batch, *whole)
        return shard_map_over_batch(self.grid, program, batch, whole, is_sum=not whole)


def _programs(
    ctx: Context,
    batch: int,
    spatial: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> _Programs:
    options = ctx.options
    grid = options.grid if options.grid is not None and batch % options.grid.size == 0 else None
    is_split_by_xla = options.partitioned and grid is None
    settings = ConvolutionParams(
        stride=_full(stride, spatial),
        padding=_full(padding, spatial),
        dilation=_full(dilation, spatial),
        groups=groups,
        platform="partitioned" if is_split_by_xla else options.platform,
        precision=ctx.convolution_precision,
    )
    return _Programs(settings, grid)


@register_lowering("convolution.default", "_convolution.default", layout=Layout.RAW)
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
    w = to_logical_array(weight)
    spatial = w.ndim - 2
    x, batched = batched_channels_last(input, spatial)
    chosen = _programs(ctx, x.shape[0], spatial, stride, padding, dilation, groups)
    if transposed:
        out = chosen.convolve_transposed(x, w, _full(output_padding, spatial))
    else:
        out = chosen.convolve(x, w)
    if bias is not None:
        out = out + bias.astype(out.dtype)
    return unbatched(ctx, input, out.astype(ctx.out_dtype), batched)


@register_lowering("convolution_backward.default", layout=Layout.RAW)
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
    w = to_logical_array(weight)
    spatial = w.ndim - 2
    dy, batched = batched_channels_last(grad_output, spatial)
    x, _ = batched_channels_last(input, spatial)
    chosen = _programs(ctx, x.shape[0], spatial, stride, padding, dilation, groups)
    gradients = _transposed_gradients if transposed else _plain_gradients
    grad_input, grad_weight = gradients(dy, x, w, chosen, output_mask)
    grad_bias = None
    if output_mask[2]:
        grad_bias = jnp.sum(dy, tuple(range(spatial + 1)), dtype=accumulation_dtype(dy.dtype))
    if grad_input is None:
        return None, grad_weight, grad_bias
    return unbatched(ctx, input, grad_input, batched), grad_weight, grad_bias


def _plain_gradients(
    dy: jax.Array, x: jax.Array, w: jax.Array, chosen: _Programs, mask: Sequence[bool]
) -> tuple[jax.Array | None, jax.Array | None]:
    grad_input = chosen.grad_input(dy, w, x.shape[1:-1]) if mask[0] else None
    grad_weight = chosen.grad_weight(x, dy, w.shape[2:]) if mask[1] else None
    return grad_input, grad_weight


def _transposed_gradients(
    dy: jax.Array, x: jax.Array, w: jax.Array, chosen: _Programs, mask: Sequence[bool]
) -> tuple[jax.Array | None, jax.Array | None]:
    """A transposed convolution is the input's gradient of a plain one with the same weight.

    Output padding of a stride or more lets that plain convolution reach past the input's end.
    """
    grad_input = grad_weight = None
    size = x.shape[1:-1]
    if mask[0]:
        grad_input = chosen.convolve(dy, w)
        grad_input = grad_input[(slice(None), *(slice(0, n) for n in size))]
    if mask[1]:
        reach = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1 - m
            for n, p, d, k, s, m in zip(
                dy.shape[1:-1],
                chosen.settings["padding"],
                chosen.settings["dilation"],
                w.shape[2:],
                chosen.settings["stride"],
                size,
                strict=True,
            )
        ]
        x = jnp.pad(x, [(0, 0), *((0, r) for r in reach), (0, 0)])
        grad_weight = chosen.grad_weight(dy, x, w.shape[2:])
    return grad_input, grad_weight
