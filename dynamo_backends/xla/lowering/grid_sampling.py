"""Sampling at given coordinates (spatial transformers), forward and backward."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dynamo_backends.xla.dtypes import accumulation_dtype
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import Layout, register_lowering
from dynamo_backends.xla.lowering.values import (
    Value,
    channels_last,
    to_logical_array,
    wrap_channels_last,
)

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _unnormalize(x: jax.Array, size: int, align_corners: bool) -> jax.Array:
    if align_corners:
        return (x + 1) / 2 * (size - 1)
    return ((x + 1) * size - 1) / 2


def _clip(x: jax.Array, size: int) -> jax.Array:
    # Not jnp.clip: the gradient on the border itself is zero, as in torch.
    return jnp.where(x <= 0, 0, jnp.where(x >= size - 1, size - 1, x))


def _reflect(x: jax.Array, size: int, align_corners: bool) -> jax.Array:
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if span == 0:
        return jnp.zeros_like(x)
    x = jnp.abs(x - low)
    flips = jnp.floor(x / span)
    rest = x - jax.lax.stop_gradient(flips) * span
    return jnp.where(flips % 2 == 0, rest + low, span - rest + low)


def _inside(x: jax.Array, size: int, padding_mode: int, align_corners: bool) -> jax.Array:
    """Brings coordinates into the image, as far as the padding mode wants that."""
    if padding_mode == _ZEROS:
        return x
    if padding_mode == _REFLECTION:
        x = _reflect(x, size, align_corners)
    return _clip(x, size)


def _read(image: jax.Array, places: Sequence[jax.Array]) -> jax.Array:
    """Elements (N, *out, C) of an image (N, *spatial, C) at whole coordinates; 0 outside."""
    batch, *size, channels = image.shape
    flat = jnp.zeros(places[0].shape, jnp.int32)
    valid = jnp.ones(places[0].shape, bool)
    for place, n in zip(places, size, strict=True):
        valid &= (place >= 0) & (place <= n - 1)
        flat = flat * n + jnp.where(valid, place, 0).astype(jnp.int32)
    rows = image.reshape(batch, -1, channels)
    picked = jax.vmap(lambda r, i: jnp.take(r, i, axis=0, mode="clip"))(
        rows, flat.reshape(batch, -1)
    )
    picked = picked.reshape(*flat.shape, channels)
    return jnp.where(valid[..., None], picked, 0)


def _cubic_weights(t: jax.Array) -> list[jax.Array]:
    a = -0.75

    def near(x: jax.Array) -> jax.Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: jax.Array) -> jax.Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _sample(
    image: jax.Array, grid: jax.Array, interpolation: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    """Samples an image (N, *spatial, C) at a grid (N, *out, spatial dims), x first."""
    size = image.shape[1:-1]
    ndim = len(size)
    raw = [_unnormalize(grid[..., ndim - 1 - d], size[d], align_corners) for d in range(ndim)]

    def inside(x: jax.Array, d: int) -> jax.Array:
        return _inside(x, size[d], padding_mode, align_corners)

    if interpolation == _NEAREST:
        return _read(image, [jnp.round(inside(x, d)) for d, x in enumerate(raw)])
    choices: list[list[tuple[jax.Array, jax.Array]]] = []
    for d, x in enumerate(raw):
        if interpolation == _BILINEAR:
            x = inside(x, d)
            low = jnp.floor(x)
            choices.append([(low, low + 1 - x), (low + 1, x - low)])
        else:
            low = jnp.floor(x)
            weights = _cubic_weights(x - low)
            choices.append([(inside(low + k - 1, d), w) for k, w in enumerate(weights)])
    total = jnp.zeros((), image.dtype)
    for corner in itertools.product(*choices):
        weight = jnp.ones((), image.dtype)
        for _, w in corner:
            weight = weight * w
        picked = _read(image, [jax.lax.stop_gradient(place) for place, _ in corner])
        seen = jnp.ones((), bool)
        for (place, _), n in zip(corner, size, strict=True):
            seen = seen & (place >= 0) & (place <= n - 1)
        total = total + jnp.where(seen, weight, 0)[..., None] * picked
    return total


@register_lowering("grid_sampler_2d.default", "grid_sampler_3d.default", layout=Layout.RAW)
def grid_sampler(
    ctx: Context,
    input: Value,
    grid: Value,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Value:
    image, points = channels_last(input), to_logical_array(grid)
    wide = accumulation_dtype(image.dtype)
    out = _sample(
        image.astype(wide), points.astype(wide), interpolation_mode, padding_mode, align_corners
    )
    return wrap_channels_last(ctx, input, out)


@register_lowering(
    "grid_sampler_2d_backward.default", "grid_sampler_3d_backward.default", layout=Layout.RAW
)
def grid_sampler_backward(
    ctx: Context,
    grad_output: Value,
    input: Value,
    grid: Value,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Value | None, jax.Array]:
    wide = accumulation_dtype(input.dtype)

    def forward(image: jax.Array, points: jax.Array) -> jax.Array:
        return _sample(image, points, interpolation_mode, padding_mode, align_corners)

    image, points = channels_last(input).astype(wide), to_logical_array(grid).astype(wide)
    _, pull = jax.vjp(forward, image, points)
    grad_image, grad_grid = pull(channels_last(grad_output).astype(wide))
    return wrap_channels_last(ctx, input, grad_image) if output_mask[0] else None, grad_grid
