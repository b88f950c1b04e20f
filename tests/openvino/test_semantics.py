"""What OpenVINO in particular does otherwise, or would."""

import pytest
import torch
from torch import nn

import dynamo_backends
from tests.checking import check

SMALL = {"min_block_size": 1}


def test_outputs_that_are_inputs_once_optimised():
    """OpenVINO leaves the memory of such outputs untouched; they have to be copied."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 1.0).clone(), y + x, torch.sigmoid(y).view(6), y.clone()

    check(fn, torch.randn(2, 3), torch.randn(2, 3), backend="ov", min_block_size=1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_outputs_that_are_copies_of_one_value(dynamic: bool):
    """Each is the caller's own, and nothing is left to eager for it."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x)
        return y, y.clone(), y.clone().clone(), torch.sigmoid(x), x.clone()

    x = torch.randn(4, 3)
    check(fn, x, backend="ov", min_block_size=1)
    results = torch.compile(fn, backend="ov", dynamic=dynamic)(x)
    results[0].fill_(3.0)
    for found, right in zip(results[1:], fn(x)[1:], strict=True):
        torch.testing.assert_close(found, right)


def test_booleans_and_small_integers():
    def fn(x: torch.Tensor, mask: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = (x > 0) & mask
        scaled = pixels.to(torch.float32) / 255
        return chosen, torch.argmax(x, -1), torch.where(chosen, x, scaled), ~mask

    x, mask = torch.randn(3, 5), torch.rand(3, 5) > 0.5
    pixels = torch.randint(0, 256, (3, 5), dtype=torch.uint8)
    check(fn, x, mask, pixels, backend="ov", ops_in_eager=None)


def test_integers_of_64_bits_keep_all_of_them():
    """OpenVINO would compute them in 32."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x.flip(0), x[:2] * 3, x.sum()

    big = torch.tensor([2**40, -(2**35) - 1, 2**31, 5])
    check(fn, big, ops_in_eager=None, backend="ov", min_block_size=1)


def test_float64_stays_float64():
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * x + 1).sqrt() - x

    (report,) = check(fn, torch.rand(7, dtype=torch.float64) * 1e6, ops_in_eager=None, backend="ov")
    assert report.ops_on_backend == 0
    assert any("computes float64 in float32" in f.reason for f in report.fallbacks)


def test_channels_last_images():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.MaxPool2d(2)).eval()
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    with torch.no_grad():
        check(model.to(memory_format=torch.channels_last), image, backend="ov")


def test_mixed_precision_of_the_model_itself():
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.relu() * 2, (x + y).neg(), y.sigmoid()

    check(fn, torch.randn(4, 4).bfloat16(), torch.randn(4, 4), backend="ov")


def test_nan_is_kept_except_by_what_is_listed():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sigmoid(), x * 2, torch.maximum(x, x + 1), x.amax(-1), x.argmax(-1)

    x = torch.tensor([[1.0, float("nan"), -3.0], [0.5, 2.0, -0.5]])
    check(fn, x, ops_in_eager=None, backend="ov", min_block_size=1)


@pytest.mark.plants_errors
def test_nan_in_what_is_listed_is_found_at_the_first_call():
    x = torch.tensor([[1.0, float("nan"), -3.0], [0.5, 2.0, -0.5]])
    with dynamo_backends.record() as reports:
        compiled = torch.compile(lambda x: (x @ torch.eye(3)).relu(), backend="ov", options=SMALL)
        assert compiled(x)[0].isnan().all()
    (text,) = reports[0].runtime_fallbacks
    assert "has NaN where eager has not, or the reverse" in text
