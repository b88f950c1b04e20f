"""Describes the static shape of a convolution, by which a program is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dynamo_backends.xla.dtypes import accumulation_dtype


class ConvolutionParams(TypedDict):
    """Holds the parameters of a convolution: stride, padding, dilation, groups, precision.

    Attributes:
        stride: Stride of a spatial dimension each.
        padding: Zeros at both ends; of a transposed convolution, what is removed there.
        dilation: Distance between taps.
        groups: Channel groups convolved independently.
        platform: The XLA platform that it will run on; by default "cpu".
        precision: Precision of XLA's dots and convolutions.
    """

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    platform: NotRequired[str]
    precision: NotRequired[jax.lax.PrecisionLike]


@dataclass(frozen=True)
class ConvShape:
    """One channels-last convolution, without its data.

    The input is ``(batch, *spatial, in_channels)``, the weight ``(out_channels,
    in_channels / groups, *kernel)`` as in torch, the output ``(batch, *out_spatial,
    out_channels)``. Padding is symmetric.

    Attributes:
        batch: Number of images.
        spatial: Input size per spatial dimension; its length is the dimensionality.
        in_channels: Input channels over all groups.
        out_channels: Output channels over all groups.
        kernel: Kernel size per spatial dimension.
        stride: Stride per spatial dimension.
        padding: Zeros added at both ends, per spatial dimension.
        dilation: Distance between kernel taps, per spatial dimension.
        groups: Number of independent channel groups.
        dtype: Name of the element type of input, weight and output.
        platform: The XLA platform it will run on: ``"cpu"``, ``"cuda"``, ``"tpu"``, …
        precision: Passed on to XLA's convolutions and dots.
    """

    batch: int
    spatial: tuple[int, ...]
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    dtype: str = "float32"
    platform: str = "cpu"
    precision: jax.lax.PrecisionLike = None

    @classmethod
    def of(
        cls,
        x: jax.Array | jax.ShapeDtypeStruct,
        w: jax.Array | jax.ShapeDtypeStruct,
        **settings: Unpack[ConvolutionParams],
    ) -> ConvShape:
        """Read the shape off an input ``(N, *spatial, C_in)`` and a torch-layout weight.

        Raises:
            ValueError: if ranks, channels or sizes do not fit together.
        """
        options: dict[str, Any] = {**settings}
        options |= {k: tuple(options[k]) for k in ("stride", "padding", "dilation")}
        shape = cls(
            batch=x.shape[0],
            spatial=tuple(x.shape[1:-1]),
            in_channels=x.shape[-1],
            out_channels=w.shape[0],
            kernel=tuple(w.shape[2:]),
            dtype=np.dtype(x.dtype).name,
            **options,
        )
        shape._validate(w.shape[1])
        return shape

    def _validate(self, weight_in_channels: int) -> None:
        n = len(self.spatial)
        for name in ("kernel", "stride", "padding", "dilation"):
            value = getattr(self, name)
            if len(value) != n:
                raise ValueError(
                    f"convolution over {n} spatial dimensions {self.spatial} needs {n} values for "
                    f"{name}, got {value}"
                )
        if self.in_channels != weight_in_channels * self.groups or self.out_channels % self.groups:
            raise ValueError(
                f"{self.in_channels} input and {self.out_channels} output channels do not fit a "
                f"weight of {weight_in_channels} input channels in each of {self.groups} groups"
            )
        if any(size < 0 for size in self.out_spatial):
            raise ValueError(
                f"kernel {self.kernel} with dilation {self.dilation} is larger than the padded "
                f"input {tuple(s + 2 * p for s, p in zip(self.spatial, self.padding, strict=True))}"
            )

    @property
    def out_spatial(self) -> tuple[int, ...]:
        """Output size per spatial dimension."""
        return tuple(
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(
                self.spatial, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result, ``(batch, *out_spatial, out_channels)``."""
        return (self.batch, *self.out_spatial, self.out_channels)

    @property
    def taps(self) -> int:
        """Number of kernel positions."""
        return math.prod(self.kernel)

    @property
    def in_per_group(self) -> int:
        """Input channels of one group."""
        return self.in_channels // self.groups

    @property
    def out_per_group(self) -> int:
        """Output channels of one group."""
        return self.out_channels // self.groups

    @property
    def pointwise(self) -> bool:
        """Returns whether the kernel has a single tap."""
        return self.taps == 1

    @property
    def is_empty(self) -> bool:
        """Returns whether the result is all zeros or has no elements."""
        return 0 in self.out_shape or 0 in (*self.spatial, *self.kernel, self.in_channels)

    def one_of(self, parts: int) -> ConvShape:
        """Returns the ungrouped convolution on one of ``parts`` equal slices of the channels."""
        return replace(
            self,
            in_channels=self.in_channels // parts,
            out_channels=self.out_channels // parts,
            groups=1,
        )


def preferred_accumulator(dtype: np.dtype | str) -> np.dtype | None:
    """Returns `preferred_element_type` for a dot or convolution; None: the input dtype.

    XLA refuses one for complex convolutions, so it is left out where it changes nothing.
    """
    wider = accumulation_dtype(dtype)
    return wider if wider != jnp.dtype(dtype) else None


def pad_spatial(x: jax.Array, low: Sequence[int], high: Sequence[int]) -> jax.Array:
    """Pad the spatial dimensions of ``(N, *spatial, C)`` with zeros; negative values crop."""
    if not any(low) and not any(high):
        return x
    config = [(0, 0, 0), *((lo, hi, 0) for lo, hi in zip(low, high, strict=True)), (0, 0, 0)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), config)


def window(
    x: jax.Array, offset: Sequence[int], size: Sequence[int], stride: Sequence[int], axis: int = 1
) -> jax.Array:
    """Returns a strided slice of ``size`` elements in the dimensions from ``axis`` on."""
    start, limit, step = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for d, (o, n, s) in enumerate(zip(offset, size, stride, strict=True), start=axis):
        start[d], limit[d], step[d] = o, o + (n - 1) * s + 1, s
    return jax.lax.slice(x, start, limit, step)
