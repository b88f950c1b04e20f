"""Padded images: any number of them, and any size where nothing depends on it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends.interface.report import record
from tests.xla.test_padded import (
    agree,
    beside,
    compiled,
    many_recompilations,
    nothing_beside,
    planted,
)

__all__ = ["beside", "many_recompilations", "nothing_beside", "planted"]


class Images(nn.Module):
    """A small network for any number of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norms = nn.ModuleList((nn.BatchNorm2d(8), nn.GroupNorm(2, 8)))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norms[0](self.first(x)).relu(), 2)
        x = F.avg_pool2d(self.norms[1](self.second(x)).relu(), 2)
        return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))


@pytest.mark.usefixtures("nothing_beside")
def test_any_number_of_images():
    model = Images().eval()
    with record() as reports, torch.no_grad():
        run = compiled(model, verify="always")
        for count in (7, 8, 3, 6):
            x = torch.randn(count, 3, 13, 13)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            agree(run(x), model(x), rtol=1e-4, atol=1e-5)
    (report,) = reports
    assert (report.exact, len(report.events)) == ("", 0)
    assert report.executables == 1


KERNEL = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(0))
DEEP = torch.randn(4, 3, 2, 3, 2, generator=torch.Generator().manual_seed(1))
BACK = torch.randn(3, 4, 3, 2, generator=torch.Generator().manual_seed(2))
LINE = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(3))


def pooled(x: Tensor, *args: Any, **settings: Any) -> Any:
    return F.max_pool2d(x, *args, return_indices=True, **settings)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "convolution": lambda x: F.conv2d(x, KERNEL, KERNEL[:, 0, 0, 0], padding=1).relu(),
    "strides": lambda x: F.conv2d(x, KERNEL, stride=(2, 3), padding=(0, 2)),
    "dilation": lambda x: F.conv2d(x.exp(), KERNEL, padding=2, dilation=2) + 1,
    "groups": lambda x: F.conv2d(x, KERNEL[:3, :1], groups=3, padding=1),
    "after another": lambda x: F.conv2d(F.conv2d(x, KERNEL, padding=1)[:, :3], KERNEL, stride=2),
    "a line": lambda x: F.conv1d(x.mean(2), LINE, padding=3, stride=2),
    "one image": lambda x: F.conv2d(x[0], KERNEL, padding=1),
    "transposed": lambda x: F.conv_transpose2d(x, BACK, stride=2, padding=1),
    "transposed and more": lambda x: F.conv_transpose2d(
        x, BACK, stride=(3, 2), padding=(0, 1), output_padding=(1, 1), dilation=(1, 2)
    ),
    "volumes": lambda x: F.conv3d(x[:, :, None] * LINE[0, :, :, None, None], DEEP, padding=1),
    "maxima": lambda x: (*pooled(x, 2), *pooled(x, 3, stride=2, padding=1)),
    "maxima with ceilings": lambda x: pooled(-x.exp(), 3, stride=2, ceil_mode=True),
    "maxima of low numbers": lambda x: F.max_pool2d(x / 0, 2, padding=1),
    "averages": lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, stride=1, padding=1)),
    "averages without padding": lambda x: F.avg_pool2d(x, (2, 3), count_include_pad=False),
    "norm of batches": lambda x: F.batch_norm(x, None, None, training=True),
}

SIZES = ((5, 14, 15), (3, 16, 9), (6, 9, 13), (2, 12, 16))


def images(batch: int, height: int, width: int) -> Tensor:
    x = torch.randn(batch, 3, height, width)
    for dim in (0, 2, 3):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_images_of_any_size(name: str):
    with record() as reports:
        run = compiled(FUNCTIONS[name], exact_after=100, bucket_growth=8.0)
        for size in SIZES:
            x = images(*size)
            agree(run(x), FUNCTIONS[name](x), rtol=1e-4, atol=1e-4)
    assert {r.exact for r in reports} == {""}


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False), "fewer elements"),
        (lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), "fewer elements"),
        (lambda x: F.adaptive_avg_pool2d(x, (3, 2)) + 1, "has no rule|has padding in a dimension"),
    ],
)
def test_what_depends_on_the_size_of_an_image_makes_it_exact(
    fn: Callable[[Tensor], Tensor], reason: str
):
    with record() as reports:
        run = compiled(fn)
        for size in SIZES[:2]:
            x = images(*size)
            agree(run(x), fn(x))
    assert any(w in reports[0].exact for w in reason.split("|")), reports[0].exact


def test_batch_norm_of_rows():
    fn = lambda x: F.batch_norm(x[:, :, None] * KERNEL[0, 0, 0], None, None, training=True)  # noqa: E731
    with record() as reports:
        run = compiled(fn, bucket_growth=8.0)
        for rows in (5, 3, 7):
            x = torch.randn(rows, 4)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            agree(run(x), fn(x), rtol=1e-4, atol=1e-5)
    assert {r.exact for r in reports} == {""}
