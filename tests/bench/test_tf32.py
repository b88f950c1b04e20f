"""What is compared with eager on GPUs: its results in TF32, where torch lets them be."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dynamo_backends.bench.suites.case import ModelCase
from dynamo_backends.bench.workload import ModelWorkload, Tf32RoundingMode, results, rounded_to_tf32


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_ten_bits_are_left_of_the_mantissa():
    ulp = 2.0**-10
    values = [1 + ulp, 1 + ulp / 2 + ulp / 8, 1 + ulp / 4, -1 - ulp, 0.0, float("inf"), 1e-30]
    found = rounded_to_tf32(torch.tensor([*values, float("nan")]))
    assert found[:6].tolist() == [1 + ulp, 1 + ulp, 1.0, -1 - ulp, 0.0, float("inf")]
    assert found[6] == pytest.approx(1e-30, rel=2**-11)
    assert found[7].isnan()
    indices = torch.tensor([3])
    assert rounded_to_tf32(indices) is indices


def test_what_torch_allows_is_rounded(precision: None):
    """By default convolutions are, and products are not."""
    generator = torch.Generator().manual_seed(0)
    image, kernel = (torch.randn(1, 4, 5, 5, generator=generator) for _ in range(2))
    x, y = (torch.randn(8, 8, generator=generator) for _ in range(2))
    torch.set_float32_matmul_precision("highest")
    with Tf32RoundingMode():
        convolution, product = F.conv2d(image, kernel), x @ y
    rounded = F.conv2d(rounded_to_tf32(image), rounded_to_tf32(kernel))
    assert torch.equal(convolution, rounded)
    assert not torch.equal(convolution, F.conv2d(image, kernel))
    assert torch.equal(product, x @ y)
    torch.set_float32_matmul_precision("high")
    with Tf32RoundingMode():
        product = x @ y
    assert torch.equal(product, rounded_to_tf32(x) @ rounded_to_tf32(y))


def test_results_on_gpus_may_be_as_inexact_as_tf32(precision: None):
    torch.set_float32_matmul_precision("high")
    inputs = (torch.randn(3, 8, generator=torch.Generator().manual_seed(0)),)
    case = ModelCase("linear", lambda: nn.Linear(8, 2), lambda: inputs, frozenset())
    work = ModelWorkload(case, "inference", torch.float32)
    expected = results(work.eager(), work.calls)
    assert work.allowed(expected) is None, "a CPU has no TF32"
    work._device = "cuda"  # of what was made above nothing is moved
    allowed = work.allowed(expected)
    assert allowed.dtype == torch.float32
    assert not torch.equal(allowed, expected)
    torch.testing.assert_close(allowed, expected, rtol=1e-2, atol=1e-2)
