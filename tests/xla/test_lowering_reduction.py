"""Reductions, running reductions and order statistics, against eager and float64."""

import math

import pytest
import torch

from tests.xla.harness import run

NAN, INF = math.nan, math.inf


def assert_equals_eager(fn, *args, rtol=1e-6, atol=1e-6):
    expected = fn(*args)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    results = run(fn, *args)
    assert len(results) == len(expected)
    for result, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(result, truth, rtol=rtol, atol=atol, equal_nan=True)


REDUCTIONS = [
    torch.sum,
    torch.mean,
    torch.amax,
    torch.amin,
    torch.any,
    torch.all,
    torch.var,
    torch.std,
    torch.var_mean,
    torch.std_mean,
    torch.logsumexp,
    torch.argmax,
    torch.argmin,
    torch.max,
    torch.min,
    torch.prod,
    torch.median,
    torch.nanmedian,
    torch.mode,
    torch.cumsum,
    torch.cumprod,
    torch.cummax,
    torch.cummin,
    torch.logcumsumexp,
    lambda x, dim: torch.kthvalue(x, 2, dim),
    lambda x, dim: torch.linalg.vector_norm(x, 3, dim),
]


@pytest.mark.parametrize("fn", REDUCTIONS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_over_each_dimension(fn, dim):
    assert_equals_eager(lambda x: fn(x, dim), torch.randn(3, 4, 5))


@pytest.mark.parametrize("fn", REDUCTIONS[:19])
def test_keeping_the_dimension(fn):
    assert_equals_eager(lambda x: fn(x, dim=1, keepdim=True), torch.randn(3, 4, 5))


@pytest.mark.parametrize("fn", [f for f in REDUCTIONS if f is not torch.var])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_of_a_scalar(fn):
    if fn is REDUCTIONS[-2]:
        pytest.skip("there is no second smallest of one value")
    assert_equals_eager(lambda x: fn(x, -1), torch.tensor(2.5))


@pytest.mark.parametrize(
    "fn",
    [
        *(torch.sum, torch.mean, torch.amax, torch.argmax, torch.argmin, torch.median),
        *(torch.nanmedian, torch.cumsum, torch.cummax, torch.cummin, torch.logsumexp, torch.max),
    ],
)
def test_nan(fn):
    x = torch.tensor([[1.0, NAN, 3.0, NAN, 2.0], [NAN] * 5, [5.0, 5.0, -INF, INF, 1.0]])
    if fn is torch.nanmedian:  # of nothing but NaN, torch returns any index
        assert_equals_eager(lambda x: fn(x, dim=1).values, x)
        x = x[::2].contiguous()
    assert_equals_eager(lambda x: fn(x, dim=1), x)


@pytest.mark.parametrize("fn", [torch.sum, torch.prod, torch.any, torch.all, torch.mean])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_of_nothing(fn, shape):
    assert_equals_eager(fn, torch.ones(shape))
    assert_equals_eager(lambda x: fn(x, dim=0), torch.ones(shape))


@pytest.mark.parametrize("fn", [torch.sum, torch.prod, torch.cumsum, torch.cumprod])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_integers_are_summed_in_int64(fn, dtype):
    x = torch.tensor([1, 200, 3, 0, 1]).to(dtype)
    assert_equals_eager(lambda x: fn(x, dim=0), x)
    assert run(lambda x: fn(x, dim=0), x)[0].dtype == torch.int64


def test_sum_to_another_dtype():
    x = torch.tensor([300, -1, 7])
    assert_equals_eager(lambda x: torch.sum(x, dtype=torch.uint8), x)
    assert_equals_eager(lambda x: torch.sum(x, dtype=torch.float64), x.float() / 3)
    assert_equals_eager(lambda x: torch.sum(x > 0), x)


def test_empty_list_of_dimensions_reduces_all_in_sum_and_none_in_any():
    x = torch.randn(2, 3)
    assert_equals_eager(lambda x: torch.sum(x, dim=[]), x)
    assert_equals_eager(lambda x: torch.any(x, dim=[]), x)


def test_bfloat16_accumulates_in_float32():
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    for fn in (torch.sum, torch.mean, torch.var, torch.linalg.vector_norm):
        (result,) = run(fn, x)
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.double(), fn(x.double()), rtol=2**-8, atol=0)


def test_variance_survives_a_large_mean():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) + 1e4
    (result,) = run(torch.var, x)
    torch.testing.assert_close(result.double(), x.double().var(), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variance_of_too_few_elements():
    for correction in (0, 1, 2):
        assert_equals_eager(lambda x, c=correction: torch.var(x, correction=c), torch.ones(1))


@pytest.mark.parametrize("order", [0, 1, 2, 3.5, -1, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_vector_norm(order, dtype):
    x = torch.randn(4, 5, dtype=dtype)
    assert_equals_eager(lambda x: torch.linalg.vector_norm(x, order, 1), x, rtol=1e-5)


def test_logsumexp_of_infinities():
    x = torch.tensor([[-INF, -INF], [INF, 1.0], [1000.0, 1000.0], [INF, -INF]])
    assert_equals_eager(lambda x: torch.logsumexp(x, 1), x)
    assert_equals_eager(lambda x: torch.logcumsumexp(x, 1), x)


def test_cumulative_extremes_return_the_last_of_equal_values():
    x = torch.tensor([1, 3, 3, 2, 3, 1, 1])
    assert_equals_eager(lambda x: torch.cummax(x, 0), x)
    assert_equals_eager(lambda x: torch.cummin(x, 0), x)


def test_mode_takes_the_smallest_of_the_most_frequent():
    x = torch.tensor([[3, 1, 3, 1, 2], [5, 4, 3, 2, 1], [7, 7, 7, 0, 0]])
    assert_equals_eager(lambda x: torch.mode(x, 1), x)


def test_median_of_an_even_number_is_the_lower_one():
    x = torch.tensor([4.0, 1.0, 3.0, 2.0])
    assert run(torch.median, x)[0] == 2.0
    assert run(torch.median, torch.ones(0))[0].isnan()


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, INF])
def test_distances_and_their_gradients(p):
    def gradients(x, y):
        out, pullback = torch.func.vjp(lambda x, y: torch.cdist(x, y, p=p), x, y)
        return out, *pullback(torch.ones_like(out))

    x, y = torch.randn(4, 3), torch.randn(5, 3)
    assert_equals_eager(gradients, torch.cat([x, y[:1]]), y, rtol=1e-5, atol=1e-5)
    assert_equals_eager(lambda x: torch.nn.functional.pdist(x, p), x, rtol=1e-5)


@pytest.mark.parametrize("value", [1e30, 1e-30, 1e20, 2e19, 1e18])
@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (3, 8), (2, 17)])
def test_norms_of_large_numbers_are_infinite_as_eager_s(value, shape):
    for dim in (0, 1, None):
        x = torch.full(shape, value)
        assert_equals_eager(lambda x, d=dim: torch.linalg.vector_norm(x, 2, d), x, rtol=1e-5)
