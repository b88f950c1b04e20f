"""Batch norm of images in training, for Inductor's loops on CPUs.

Inductor makes a sum over all pixels of a channel a loop over pixels inside one over channels, eight
at a time; where images are channels last in memory, each of these goes through all of it. Here such
a sum is one of rows first, which are in a cache while they are summed, and then one of their sums.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)


def batch_norm_forward(
    image: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes batch norm of (N, C, H, W) images in training; returns statistics too.

    Returns:
        The images; mean and 1 / standard deviation, of shape (C); new running mean and variance.
    """
    wide = _wide(image)
    variance, mean = _moments(wide)
    invstd = torch.rsqrt(variance + eps)
    result = (wide - _over_pixels(mean)) * _over_pixels(invstd)
    if weight is not None:
        result = result * _over_pixels(weight)
    if bias is not None:
        result = result + _over_pixels(bias)
    count = image.numel() // image.shape[1]
    new_mean = _moved(running_mean, mean, momentum)
    new_var = _moved(running_var, variance * (count / max(count - 1, 1)), momentum)
    return result.to(image.dtype), mean, invstd, new_mean, new_var


def backward(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Computes batch norm's gradients of the image, weight and bias, as `mask` asks."""
    wide, centered = _wide(gradient), _wide(image) - _over_pixels(mean)
    count = image.numel() // image.shape[1]
    total, product = _sum(wide), _sum(wide * centered)
    scale = invstd if weight is None else invstd * weight
    slope = product * invstd * invstd / count
    of_image = wide - _over_pixels(total / count) - centered * _over_pixels(slope)
    dtype = image.dtype if weight is None else weight.dtype
    return (
        (of_image * _over_pixels(scale)).to(image.dtype) if mask[0] else None,
        (product * invstd).to(dtype) if mask[1] else None,
        total.to(dtype) if mask[2] else None,
    )


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in _HALVES else value


def _over_pixels(value: Tensor) -> Tensor:
    return value[:, None, None]


def _sum(image: Tensor) -> Tensor:
    return image.sum(3).sum((0, 2))


def _moments(image: Tensor) -> tuple[Tensor, Tensor]:
    """Variance (of the population) and mean of each channel."""
    means = image.mean(3)
    within = (image - means[..., None]).square().sum(3)
    mean = means.mean((0, 2))
    between = (means - mean[:, None]).square().mean((0, 2))
    return within.sum((0, 2)) / (image.numel() // image.shape[1]) + between, mean


def _moved(running: Tensor | None, value: Tensor, momentum: float) -> Tensor | None:
    if running is None:
        return None
    return (momentum * value + (1 - momentum) * running).to(running.dtype)
