"""How fast the processor multiplies, for limits that no program of products can pass."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

_RUNS = 15


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
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
