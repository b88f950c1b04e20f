"""Transposed convolutions, which are also the input gradients of convolutions.

Both scatter ``x[i] · w[k]`` to the position ``i · stride - padding + k · dilation``. Seen from the
output, position ``y`` with ``y + padding = stride · q + r`` (phase ``r``) gathers the taps
``k = r, r + stride, …``: for each phase an ordinary convolution of stride 1, whose results are
interleaved. Phases with equally many taps are computed together, as more output channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from dynamo_backends.xla.lowering.convolution_rules import convolve
from dynamo_backends.xla.lowering.convolution_shape import (
    ConvolutionParams,
    pad_spatial,
    preferred_accumulator,
)


def convolve_transposed(
    x: jax.Array,
    w: jax.Array,
    *,
    output_padding: Sequence[int],
    **settings: Unpack[ConvolutionParams],
) -> jax.Array:
    """Transposed convolution as in ``torch.nn.ConvTranspose``, channels last, without bias.

    Args:
        x: Input, ``(N, *spatial, C_in)``.
        w: Weight in torch's layout, ``(C_in, C_out / groups, *kernel)``.
        output_padding: Added to the far end of each spatial dimension.
        **settings: See `ConvolutionParams`.

    Returns:
        ``(N, *out_spatial, C_out)`` in ``x``'s dtype, where ``out_spatial`` is
        ``(spatial - 1) · stride - 2 · padding + dilation · (kernel - 1) + output_padding + 1``.
    """
    steps = zip(settings["stride"], settings["padding"], settings["dilation"], strict=True)
    sizes = zip(x.shape[1:-1], w.shape[2:], output_padding, strict=True)
    out_spatial = tuple(
        (size - 1) * s - 2 * p + d * (k - 1) + extra + 1
        for (size, k, extra), (s, p, d) in zip(sizes, steps, strict=True)
    )
    return grad_input(x, w, out_spatial, **settings)


def grad_input(
    dy: jax.Array,
    w: jax.Array,
    input_spatial: Sequence[int],
    **settings: Unpack[ConvolutionParams],
) -> jax.Array:
    """Gradient of `convolve` with respect to its input: scatters ``dy`` through ``w``.

    What falls outside of the input is dropped, what nothing reaches is 0.

    Args:
        dy: Gradient of the result, ``(N, *out_spatial, C_out)``.
        w: The weight, ``(C_out, C_in / groups, *kernel)``.
        input_spatial: Spatial size of the input, which ``dy`` alone does not determine.
        **settings: As given to `convolve`.

    Returns:
        ``(N, *input_spatial, C_in)`` in ``dy``'s dtype.
    """
    groups = settings["groups"]
    channels = w.shape[1] * groups
    if 0 in (*dy.shape, *w.shape, *input_spatial):
        return jnp.zeros((dy.shape[0], *input_spatial, channels), dy.dtype)
    # (g, C_out/g, C_in/g, *kernel) -> (g, C_in/g, C_out/g, *kernel)
    w = w.reshape(groups, -1, *w.shape[1:]).swapaxes(1, 2)
    scatter = _scatter_by_phases if settings.get("platform", "cpu") == "cpu" else _scatter_lax
    return scatter(
        *(dy, w, input_spatial, settings["stride"], settings["padding"], settings["dilation"]),
        settings.get("precision"),
    )


def _scatter_by_phases(
    dy: jax.Array,
    w: jax.Array,
    input_spatial: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    precision: lax.PrecisionLike,
) -> jax.Array:
    """As `grad_input`, with convolutions of stride 1, whose results are interleaved.

    Args:
        dy: See `grad_input`; so the others but for the weight.
        w: ``(g, C_in/g, C_out/g, *kernel)``.
        input_spatial: Spatial size of the input.
        stride: As given to `convolve`.
        padding: As given to `convolve`.
        dilation: As given to `convolve`.
        precision: Precision of XLA's dots and convolutions.
    """
    spread = [s if s > 1 and d > 1 else 1 for s, d in zip(stride, dilation, strict=True)]
    dy = _spread(dy, spread)
    stride = tuple(s // e for s, e in zip(stride, spread, strict=True))
    first = [p // s for p, s in zip(padding, stride, strict=True)]
    last = [(o - 1 + p) // s for o, p, s in zip(input_spatial, padding, stride, strict=True)]

    def rows(segments: tuple[_Segment, ...]) -> jax.Array:
        """One convolution for all phases of the segments: ``(N, *q, *phases, g, C_in/g)``."""
        counts = [s.phases for s in segments]
        taps = [s.taps for s in segments]
        quotients = [b - a + 1 for a, b in zip(first, last, strict=True)]
        if 0 in taps:
            shape = (dy.shape[0], *quotients, *counts, w.shape[0], w.shape[1])
            return jnp.zeros(shape, dy.dtype)
        kernel = _phase_kernel(w, segments, stride)
        reach = [d * (m - 1) for d, m in zip(dilation, taps, strict=True)]
        low = [r - a for r, a in zip(reach, first, strict=True)]
        high = [b - size + 1 for b, size in zip(last, dy.shape[1:-1], strict=True)]
        padded, equal = _pad_unequal(dy, low, high)
        y = convolve(
            padded,
            kernel,
            stride=(1,) * len(taps),
            padding=equal,
            dilation=dilation,
            groups=w.shape[0],
            platform="cpu",
            precision=precision,
        )
        y = y.reshape(*y.shape[:-1], w.shape[0], *counts, -1)
        n = len(counts)
        return jnp.moveaxis(y, n + 1, -2)

    n = len(input_spatial)
    y = _assemble(rows, [_segments(k, s) for k, s in zip(w.shape[3:], stride, strict=True)], n)
    y = _interleave(y, n)
    start = [p - a * s for p, a, s in zip(padding, first, stride, strict=True)]
    limit = [a + o for a, o in zip(start, input_spatial, strict=True)]
    return lax.slice(y, (0, *start, 0), (y.shape[0], *limit, w.shape[0] * w.shape[1]))


class _Segment(NamedTuple):
    """Consecutive phases ``start … start + phases - 1`` of one axis, each with ``taps`` taps."""

    start: int
    phases: int
    taps: int


def _segments(kernel: int, stride: int) -> list[_Segment]:
    fewer, longer = divmod(kernel, stride)
    segments = [_Segment(0, longer, fewer + 1), _Segment(longer, stride - longer, fewer)]
    return [s for s in segments if s.phases]


def _phase_kernel(w: jax.Array, segments: tuple[_Segment, ...], stride: Sequence[int]) -> jax.Array:
    """(g, O, I, *kernel) -> (g · phases · O, I, *taps), taps reversed."""
    groups, out, inner = w.shape[:3]
    n = len(segments)
    # Tap k = phase + stride · i lies at row i, column phase of the kernel cut into rows.
    for d, (segment, s) in enumerate(zip(segments, stride, strict=True)):
        axis = 3 + 2 * d
        short = segment.taps * s - w.shape[axis]
        w = lax.pad(
            w, jnp.zeros((), w.dtype), [(0, short if a == axis else 0, 0) for a in range(w.ndim)]
        )
        w = w.reshape(*w.shape[:axis], segment.taps, s, *w.shape[axis + 1 :])
        w = lax.slice_in_dim(w, segment.start, segment.start + segment.phases, axis=axis + 1)
    w = lax.rev(w, [3 + 2 * d for d in range(n)])
    order = (0, *(4 + 2 * d for d in range(n)), 1, 2, *(3 + 2 * d for d in range(n)))
    phases = math.prod(s.phases for s in segments)
    return w.transpose(order).reshape(groups * phases * out, inner, *(s.taps for s in segments))


def _assemble(
    rows: Callable[[tuple[_Segment, ...]], jax.Array], axes: list[list[_Segment]], n: int
) -> jax.Array:
    """Concatenate the results of all combinations of segments along their phase axes."""

    def join(chosen: tuple[_Segment, ...]) -> jax.Array:
        depth = len(chosen)
        if depth == n:
            return rows(chosen)
        parts = [join((*chosen, segment)) for segment in axes[depth]]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1 + n + depth)

    return join(())


def _interleave(y: jax.Array, n: int) -> jax.Array:
    """(N, q1…qn, s1…sn, g, C) -> (N, q1, s1, …, qn, sn, g, C) -> (N, q1·s1, …, qn·sn, g·C)."""
    order = [0, *itertools.chain.from_iterable((1 + d, 1 + n + d) for d in range(n))]
    y = y.transpose(*order, 2 * n + 1, 2 * n + 2)
    return y.reshape(y.shape[0], *(y.shape[i] * y.shape[i + 1] for i in range(1, 2 * n, 2)), -1)


def _pad_unequal(
    x: jax.Array, low: Sequence[int], high: Sequence[int]
) -> tuple[jax.Array, list[int]]:
    """Pad by what one side has more; returns also what is left, equal on both sides.

    That is left to the program, which may have it for free.
    """
    equal = [max(0, min(pair)) for pair in zip(low, high, strict=True)]
    padded = pad_spatial(
        x,
        [a - e for a, e in zip(low, equal, strict=True)],
        [b - e for b, e in zip(high, equal, strict=True)],
    )
    return padded, equal


def _spread(x: jax.Array, factors: Sequence[int]) -> jax.Array:
    """Put ``factor - 1`` zeros between neighbours of each spatial dimension."""
    if set(factors) == {1}:
        return x
    config = [(0, 0, 0), *((0, 0, f - 1) for f in factors), (0, 0, 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _scatter_lax(
    x: jax.Array,
    w: jax.Array,
    out_spatial: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    precision: lax.PrecisionLike,
) -> jax.Array:
    """As one convolution with a dilated input, the form that accelerators recognise."""
    groups, n = w.shape[0], len(out_spatial)
    w = lax.rev(w, range(3, 3 + n)).reshape(-1, *w.shape[2:])
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
    low = [r - p for r, p in zip(reach, padding, strict=True)]
    high = [
        o - 1 + p - (size - 1) * s
        for o, p, size, s in zip(out_spatial, padding, x.shape[1:-1], stride, strict=True)
    ]
    last = (0, n + 1, *range(1, n + 1))
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=(1,) * n,
        padding=list(zip(low, high, strict=True)),
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=lax.ConvDimensionNumbers(last, (0, 1, *range(2, 2 + n)), last),
        feature_group_count=groups,
        precision=precision,
        preferred_element_type=preferred_accumulator(x.dtype),
    ).astype(x.dtype)
