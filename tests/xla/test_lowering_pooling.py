"""Pooling, forward and backward, against eager."""

import pytest
import torch
import torch.nn.functional as F

from tests.xla.lowering_checks import assert_like_eager, gradient

aten = torch.ops.aten
X = torch.randn(2, 3, 20, 21, generator=torch.Generator().manual_seed(0))
WINDOWS = [
    (3, 2, 1, 1, False),
    (3, 2, 1, 1, True),
    (9, 9, 0, 1, False),  # too large for shifts
    (2, 3, 1, 2, True),
    ((2, 5), (1, 3), (1, 2), 1, False),
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_pool(window, dtype):
    x = X.to(dtype)
    assert_like_eager(lambda x: F.max_pool2d(x, *window, True), x)
    assert_like_eager(gradient(lambda x: F.max_pool2d(x, *window)), x)


@pytest.mark.parametrize("window", [*WINDOWS, (3, 1, 1, 1, False), (2, 5, 0, 1, False)])
def test_gradient_in_a_program_of_its_own(window):
    """As in a backward graph that gets the places of the maxima from the forward one."""
    pooled, places = F.max_pool2d(X.double(), *window, return_indices=True)
    kernel, stride, padding, dilation, ceil = window
    geometry = ([kernel] * 2 if isinstance(kernel, int) else list(kernel), stride, padding)
    lists = [[g] * 2 if isinstance(g, int) else list(g) for g in (*geometry, dilation)]

    def backward(grad, x, places):
        op = aten.max_pool2d_with_indices_backward
        return op(grad, x, *lists, ceil, places)

    assert_like_eager(backward, torch.randn_like(pooled), X.double(), places)


def test_gradient_over_three_dimensions():
    x = X.unflatten(3, (7, 3))
    assert_like_eager(gradient(lambda x: F.max_pool3d(x, (3, 2, 2), (2, 1, 3), (1, 0, 1))), x)


def test_max_pool_passes_nan_on():
    x = X.index_fill(2, torch.tensor(3), torch.nan)
    assert_like_eager(lambda x: F.max_pool2d(x, 3, 2, 1), x)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_gradient_where_nothing_is_larger(value):
    x = X.index_fill(2, torch.tensor([0, 1, 2, 7]), value)
    assert_like_eager(gradient(lambda x: F.max_pool2d(x, 3, 2, 1)), x)
    assert_like_eager(gradient(lambda x: F.max_pool2d(x, 2)), torch.full((1, 2, 6, 6), value))


def test_gradient_of_ties():
    assert_like_eager(gradient(lambda x: F.max_pool2d(x, 3, 2, 1)), X.relu().round())
    assert_like_eager(gradient(lambda x: F.adaptive_max_pool2d(x, (5, 7))), X.relu().round())


def test_ties_go_to_the_first_element():
    assert_like_eager(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), X.round())
    assert_like_eager(lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True), X.round())


@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_positions_of_what_is_no_number(value: float, share: float):
    generator = torch.Generator().manual_seed(0)
    x = torch.where(torch.rand(X.shape, generator=generator) < share, value, X)
    assert_like_eager(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), x)
    assert_like_eager(lambda x: F.adaptive_max_pool1d(x, 5, return_indices=True), x[0])
    for size in ((3, 4), (5, 7), (2, 3)):
        assert_like_eager(lambda x, size=size: F.adaptive_max_pool2d(x, size, True), x)
    x = x.unflatten(3, (7, 3))
    assert_like_eager(lambda x: F.adaptive_max_pool3d(x, (3, 2, 2), True), x)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("divisor", [None, 7])
def test_avg_pool(include, divisor):
    def fn(x):
        return F.avg_pool2d(x, 3, 2, 1, True, include, divisor)

    assert_like_eager(fn, X)
    assert_like_eager(gradient(fn), X)


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (7, 6), (20, 21), (25, 30)])
def test_adaptive(size):
    for fn in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
        assert_like_eager(lambda x, fn=fn: fn(x, size), X)
        assert_like_eager(gradient(lambda x, fn=fn: fn(x, size)), X)


def test_other_ranks():
    x = X.unflatten(3, (7, 3))
    assert_like_eager(lambda x: F.max_pool3d(x, 2, 1, 1), x)
    assert_like_eager(lambda x: F.avg_pool3d(x, 2, 1, 1), x)
    assert_like_eager(lambda x: F.adaptive_avg_pool3d(x, (3, 2, 1)), x)
    assert_like_eager(lambda x: F.max_pool1d(x, 3, 2), X[0])
    assert_like_eager(lambda x: F.avg_pool1d(x, 3, 2), X[0])
    assert_like_eager(lambda x: F.max_pool2d(x, 2), X[0])
