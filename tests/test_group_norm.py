"""`group_norm` of strides that torch's fake kernels do not promise and its kernel refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynamo_backends
from tests.backend_checks import usable


def normalized(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As the attention of an autoencoder for images."""
    batch, channels, height, width = x.shape
    rows = x.view(batch, channels, height * width).transpose(1, 2) @ weight
    image = rows.transpose(-1, -2).reshape(batch, channels, height, width)
    return F.group_norm(image, 2), F.group_norm(F.interpolate(image, scale_factor=2.0), 2)


@pytest.mark.parametrize(
    "kept", [(), ("native_group_norm",), ("native_group_norm", "bmm", "upsample_nearest2d")]
)
@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "inductor_freezing"])
def test_results_are_compared_and_computed_in_eager(backend: str, kept: tuple[str, ...]) -> None:
    options = {"verify": "always", "keep_in_eager": kept}
    compiler = dynamo_backends.compiler(usable(backend), **options)
    x, weight = torch.randn(1, 4, 3, 3), torch.randn(4, 4)
    with torch.no_grad(), dynamo_backends.record() as reports:
        results = torch.compile(normalized, backend=compiler)(x, weight)
        for result, expected in zip(results, normalized(x, weight), strict=True):
            torch.testing.assert_close(result, expected)
    assert [report.unverified for report in reports] == [[]] * len(reports)
