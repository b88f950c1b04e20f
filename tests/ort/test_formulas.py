"""Formulas in the place of lowerings: all digits, NaN and 64 bits, which usual values hide."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynamo_backends
from dynamo_backends.onnx.formulas import FORMULAS

INF, NAN = float("inf"), float("nan")
HARD = (0.0, -0.0, 1e-30, -1e-20, 1e-7, -1e-7, 0.3, -0.3, 0.5, -0.5, 0.9, -0.9, 1.5, -2.5, 4.0, 9.0,
        -5.0, -10.0, -16.0, -17.5, -18.5, -20.0, -80.0, 20.0, 88.0, 100.0, 1e10, -1e10,
        1e30, INF, -INF, NAN)  # fmt: skip
LARGE = (2**31 + 5, 1, 1, -(2**40), 7, 2**63 - 1, -(2**63), 0, 1, 1, 2**33, 3)


def assert_same(result: Tensor, expected: Tensor) -> None:
    """Equal within 1e-5 of each element; zeros are zeros."""
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=0, equal_nan=True)


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    options = {"min_block_size": 1, "verify": "off", "cache": False, "fallback": "error"}
    return torch.compile(function, backend=dynamo_backends.compiler("onnxrt", **options))


@pytest.mark.parametrize("name", ["expm1", "log1p", "erfc", "sigmoid", "trunc", "frac"])
def test_pointwise_formulas_have_all_digits(name: str):
    x = torch.tensor(HARD)
    function = getattr(torch, name)
    expected = function(x.double()).float()
    formula = FORMULAS[getattr(torch.ops.aten, name).default].function(x)
    assert_same(formula, expected)
    zeros = expected == 0
    assert torch.equal(formula[zeros].signbit(), expected[zeros].signbit())
    with torch.no_grad():
        assert_same(compiled(lambda x: function(x) * 1.0)(x), expected)


@pytest.mark.parametrize("name", ["silu", "elu", "celu", "selu"])
def test_activations_have_all_digits(name: str):
    x = torch.tensor(HARD)
    function = getattr(F, name)
    with torch.no_grad():
        assert_same(compiled(lambda x: function(x) * 1.0)(x), function(x.double()).float())


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extrema_see_nan_and_64_bits(name: str, keepdim: bool, dim: int):
    numbers = torch.tensor([[1.0, NAN, 2.0], [NAN, INF, NAN], [-INF, -INF, -INF], [2.0, 3.0, 3.0]])
    integers = torch.tensor([LARGE, LARGE[::-1]])

    def all_of(x: Tensor) -> list[Tensor]:
        values, indices = getattr(x, name)(dim, keepdim)
        alone = getattr(x, f"a{name}")(dim, keepdim)
        return [values, indices, alone, getattr(x, f"arg{name}")(dim, keepdim)]

    for x in (numbers, numbers.double(), integers):
        with torch.no_grad():
            for result, expected in zip(compiled(all_of)(x), all_of(x), strict=True):
                assert torch.equal(result.nan_to_num(123), expected.nan_to_num(123))


def test_extrema_of_several_dimensions():
    x = torch.tensor([LARGE, LARGE[::-1]]).view(2, 3, 4)
    with torch.no_grad():
        for dims in ((0, 2), (1, 2), (0, 1, 2)):
            function = lambda x, d=dims: (x.amax(d) + 1, x.amin(d, True) - 1)  # noqa: E731
            for result, expected in zip(compiled(function)(x), function(x), strict=True):
                assert torch.equal(result, expected)


def test_norms_of_large_and_small_numbers():
    x = torch.tensor([[1e30, 1.0, -1e30], [1e-30, 1e-25, 0.0]])
    with torch.no_grad():
        exact = F.normalize(x.double(), eps=0).float()
        assert_same(compiled(lambda x: x / x.norm(dim=1, keepdim=True))(x), exact)


def test_bytes_are_negated():
    x = torch.tensor([0, 1, 128, 255], dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(compiled(lambda x: (-x) + 1)(x), -x + 1)


def test_small_constants_are_no_zeros_and_ones():
    x = torch.tensor([1e-10, 2e-10])

    def function(x: Tensor) -> Tensor:
        return torch.stack([x - 1e-10, x + 1e-10, x * 1.000001, x / 1.000001])

    with torch.no_grad():
        assert torch.equal(compiled(function)(x), function(x))
