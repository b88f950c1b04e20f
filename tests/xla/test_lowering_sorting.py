"""Sorting and searching, against eager."""

import math

import pytest
import torch

from tests.xla.harness import run
from tests.xla.lowering_checks import assert_like_eager

# Both zeros are equal, NaN of either sign is the largest, and denormal numbers are not zero.
TRICKY = torch.tensor(
    [3.0, math.nan, -0.0, 0.0, 1.0, -math.nan, math.inf, 1.0, -math.inf, 1e-42, -1e-42, 0.0]
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_stable_sort(descending, dtype, dim):
    x = TRICKY if dtype.is_floating_point else torch.randint(0, 9, (40,))
    x = torch.stack([x, x.flip(0)]).to(dtype)
    fn = lambda x: torch.sort(x, stable=True, dim=dim, descending=descending)  # noqa: E731
    assert_like_eager(fn, x)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("k", [2, 12])
def test_topk(largest, k):
    x = TRICKY.repeat(4)
    expected = x.topk(k, largest=largest)[0]
    values, places = run(lambda x: x.topk(k, largest=largest), x)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x[places], values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("right", [False, True])
def test_search(right):
    edges = torch.tensor([0.0, 1.0, 1.0, 2.0])
    values = torch.tensor([[math.nan, 1.0], [5.0, -1.0]])
    assert_like_eager(lambda e, v: torch.bucketize(v, e, right=right), edges, values)
    rows = torch.stack([edges, edges * 3])
    assert_like_eager(lambda e, v: torch.searchsorted(e, v, right=right), rows, values)
    order = torch.tensor([2, 0, 1, 3])
    assert_like_eager(
        lambda e, v, order: torch.searchsorted(e, v, sorter=order, right=right),
        edges[order.argsort()],
        values,
        order,
    )
