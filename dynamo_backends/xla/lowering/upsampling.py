"""Interpolation to another size, forward and backward.

Positions and weights are computed in float64 and rounded to the dtype of the data (float32 for
half precision); the nearest neighbour's in float32, as torch's kernel does.
"""

from collections.abc import Callable, Sequence

from torch import fx

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.layouts import finish_channels_last
from dynamo_backends.xla.lowering.registry import Layout, lowers
from dynamo_backends.xla.lowering.resampling import (
    Taps,
    antialiased,
    cubic,
    linear,
    nearest,
    resample,
)
from dynamo_backends.xla.lowering.values import Value, channels_last

Table = Callable[[int, int, float | None], Taps]  # of input size, output size and scale


def _integers(node: fx.Node) -> str | None:
    if not node.meta["val"].is_floating_point():
        return "torch interpolates integers with fixed-point weights"
    return None


def _upsample(ctx: Context, x: Value, scales: Sequence[float | None], table: Table) -> Value:
    array = channels_last(x)
    array = array.astype(accumulation_dtype(array.dtype))
    antialiasing = "_aa" in str(ctx.node.target)
    for axis, (count, scale) in enumerate(zip(ctx.out.shape[2:], scales, strict=True), 1):
        if antialiasing and array.shape[axis] == count:
            continue  # whatever the scale, as in torch
        array = resample(array, axis, table(array.shape[axis], count, scale))
    return finish_channels_last(ctx, x, array)


def _gradient(
    ctx: Context,
    grad_output: Value,
    input_size: Sequence[int],
    scales: Sequence[float | None],
    table: Table,
) -> Value:
    array = channels_last(grad_output)
    name = str(ctx.node.target)
    if tuple(input_size) == tuple(grad_output.shape) and "exact" not in name and "_aa" not in name:
        return grad_output  # whatever the scale, and whatever the forward pass did, as in torch
    array = array.astype(accumulation_dtype(array.dtype))
    for axis, (size, scale) in enumerate(zip(input_size[2:], scales, strict=True), 1):
        taps = table(size, array.shape[axis], scale).transposed()
        array = resample(array, axis, taps)
    return finish_channels_last(ctx, grad_output, array)


def _all(scales: tuple[float | None, ...], spatial: int) -> tuple[float | None, ...]:
    return scales + (None,) * (spatial - len(scales))


def _nearest(exact: bool) -> Table:
    return lambda size, count, scale: nearest(size, count, scale, exact)


def _linear(align_corners: bool) -> Table:
    return lambda size, count, scale: linear(size, count, align_corners, scale)


def _cubic(align_corners: bool) -> Table:
    return lambda size, count, scale: cubic(size, count, align_corners, scale)


def _antialiased(align_corners: bool, order: int) -> Table:
    return lambda size, count, scale: antialiased(size, count, align_corners, scale, order)


def _register_nearest(name: str, spatial: int, exact: bool) -> None:
    @lowers(f"{name}.default", layout=Layout.RAW)
    def forward(
        ctx: Context, self: Value, output_size: Sequence[int], *scales: float | None
    ) -> Value:
        array = channels_last(self)
        for axis, (count, scale) in enumerate(
            zip(output_size, _all(scales, spatial), strict=True), 1
        ):
            array = resample(array, axis, nearest(array.shape[axis], count, scale, exact))
        return finish_channels_last(ctx, self, array)

    @lowers(f"{name}_backward.default", layout=Layout.RAW)
    def backward(
        ctx: Context,
        grad_output: Value,
        output_size: Sequence[int],
        input_size: Sequence[int],
        *scales: float | None,
    ) -> Value:
        return _gradient(ctx, grad_output, input_size, _all(scales, spatial), _nearest(exact))


def _register(name: str, spatial: int, table: Callable[[bool], Table]) -> None:
    @lowers(f"{name}.default", layout=Layout.RAW, when=_integers)
    def forward(
        ctx: Context,
        self: Value,
        output_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        return _upsample(ctx, self, _all(scales, spatial), table(align_corners))

    @lowers(f"{name}_backward.default", layout=Layout.RAW)
    def backward(
        ctx: Context,
        grad_output: Value,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        return _gradient(ctx, grad_output, input_size, _all(scales, spatial), table(align_corners))


for _n in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_n}d", _n, exact=False)
    _register_nearest(f"_upsample_nearest_exact{_n}d", _n, exact=True)
_register("upsample_linear1d", 1, _linear)
_register("upsample_bilinear2d", 2, _linear)
_register("upsample_trilinear3d", 3, _linear)
_register("upsample_bicubic2d", 2, _cubic)
_register("_upsample_bilinear2d_aa", 2, lambda align: _antialiased(align, 1))
_register("_upsample_bicubic2d_aa", 2, lambda align: _antialiased(align, 3))
