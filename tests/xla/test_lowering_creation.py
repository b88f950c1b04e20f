"""Tensors made of numbers, and conversions, against eager."""

import math

import pytest
import torch

from tests.xla.lowering_checks import assert_like_eager

# What no narrow integer holds: C++ and XLA convert it differently.
AWKWARD = [300.7, -1.5, -129.2, 1e5, 3e9, -3e9, 1e19, 1e20, math.nan, math.inf, -math.inf]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", INTEGERS)
def test_float_to_integer_overflows_as_in_torch(source, target):
    assert_like_eager(lambda x: x.to(target), torch.tensor(AWKWARD).to(source))


@pytest.mark.parametrize("target", [torch.uint8, torch.int8, torch.bool, torch.bfloat16])
def test_integer_conversions_wrap(target):
    assert_like_eager(lambda x: x.to(target), torch.tensor([-129, 255, 256, 70000, 0, -1]))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.full_like(x, -1, dtype=torch.uint8),
        lambda x: x.new_full((2,), math.inf),
        lambda x: torch.arange(1, 8, 3),
        lambda x: torch.arange(-1, 1, 0.1),
        lambda x: torch.arange(5, 0, -2, dtype=torch.bfloat16),
        lambda x: torch.linspace(-1, 1, 7),
        lambda x: torch.linspace(0, 7, 50, dtype=torch.int64),
        lambda x: torch.linspace(4.3, -3, 50, dtype=torch.int32),
        lambda x: torch.linspace(3, 7, 1),
        lambda x: torch.eye(3, 5),
        lambda x: torch.tril(x, -1),
        lambda x: torch.triu(x, 1),
        lambda x: torch.tril_indices(3, 4, 1),
        lambda x: torch.triu_indices(3, 4, -1),
        lambda x: torch.scalar_tensor(2, dtype=torch.int64),
        lambda x: x.fill_(3),
    ],
)
def test_creation(fn):
    assert_like_eager(lambda x: fn(x.clone()), torch.full((3, 4), math.nan))
