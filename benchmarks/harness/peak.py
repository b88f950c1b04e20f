"""How fast the processor multiplies, for limits that no program of products can pass."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from harness.calls import seconds

_RUNS = 15


@dataclass(frozen=True)
class Products:
    """What a call multiplies, and how fast the processor can.

    Attributes:
        gflop: 1e9 operations of products and convolutions in a call, as torch.utils.flop_counter
            counts those of eager, but for gradients of convolutions in groups, of which it counts
            all channels.
        peak: GFLOP/s that the processor reached just after, see `peak_gflops`.
    """

    gflop: float = 0.0
    peak: float = 0.0

    def limit(self, eager_ms: float) -> float | None:
        """How much faster than eager a call is that does nothing but products, at the peak."""
        return eager_ms / (self.gflop / self.peak * 1e3) if self.gflop and self.peak else None


def products_of(call: Callable[[], object]) -> Products:
    """The products of a call of eager, which is run once, without operators of whole layers."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # nobody counts what those multiply
    try:
        with FlopCounterMode(display=False, custom_mapping=_MAPPING) as counter:
            call()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return Products(counter.get_total_flops() / 1e9, peak_gflops())


def _of_gradients(
    grad_shape: Sequence[int],
    image_shape: Sequence[int],
    weight_shape: Sequence[int],
    *arguments: Any,
    out_shape: Any,
) -> int:
    """Operations of `aten.convolution_backward`: as many as of the convolution, per gradient."""
    *_, transposed, _, _, mask = arguments
    windows = image_shape if transposed else grad_shape
    return 2 * math.prod(windows) * math.prod(weight_shape[1:]) * sum(mask[:2])


_MAPPING = {torch.ops.aten.convolution_backward: _of_gradients}


def peak_gflops() -> float:
    """GFLOP/s of float32 on all of torch's threads: the best of a product and a convolution.

    Both are large enough to be bound by arithmetic and small enough for a second; the convolution
    is direct, in the order of memory that oneDNN prefers.
    """
    n, channels, size = 1536, 128, 56
    left, right = torch.randn(n, n), torch.randn(n, n)
    images = torch.randn(4, channels, size, size).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3)
    with torch.no_grad():
        product = 2 * n**3 / _seconds(lambda: left @ right)
        operations = 2 * 4 * channels**2 * 9 * size**2
        convolution = operations / _seconds(lambda: F.conv2d(images, weight, padding=1))
    return max(product, convolution) / 1e9


def _seconds(function: Callable[[], object]) -> float:
    return statistics.median(seconds(function) for _ in range(_RUNS))
