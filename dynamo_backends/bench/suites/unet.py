"""A U-Net with transposed convolutions (Ronneberger et al., 2015, arXiv:1505.04597)."""

from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.bench.suites.case import ModelCase, Scale, image

_TAGS = frozenset({"conv", "transposed"})


def unet(scale: Scale = "bench", batch: int = 4) -> list[ModelCase]:
    """Returns the suite: two ways to make an image larger again.

    Args:
        scale: "bench": 4 levels from 32 channels at 128x128; "test": 2 levels from 8 at 32x32.
        batch: Images per call.
    """
    width, depth, size = (32, 4, 128) if scale == "bench" else (8, 2, 32)
    example = image(batch, size)
    return [
        ModelCase("unet", lambda: UNet(width, depth), example, _TAGS),
        ModelCase("unet_overlapping", lambda: UNet(width, depth, overlap=True), example, _TAGS),
    ]


class UNet(nn.Module):
    """Encoder and decoder with skip connections.

    Args:
        width: Channels of the first level; each level below has twice as many.
        depth: Number of levels below the first.
        classes: Channels of the result.
        overlap: Whether transposed convolutions overlap (kernel 3, output padding) or tile
            (kernel 2).
    """

    def __init__(self, width: int, depth: int, classes: int = 5, overlap: bool = False):
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(_double(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        kernel: dict[str, Any] = (
            {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}
            if overlap
            else {"kernel_size": 2, "stride": 2}
        )
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, o, **kernel) for i, o in pairs)
        self.merge = nn.ModuleList(_double(2 * o, o) for _, o in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, 3, height, width] to scores [batch, classes, height, width]."""
        skips = []
        for level in self.down[:-1]:
            x = level(x)
            skips.append(x)
            x = self.pool(x)
        x = self.down[-1](x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def _double(channels: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in (channels, out):
        layers += [nn.Conv2d(i, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers)
