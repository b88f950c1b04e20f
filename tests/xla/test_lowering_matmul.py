"""Matrix products and distances, against eager."""

import pytest
import torch
import torch.nn.functional as F

from tests.xla.harness import run
from tests.xla.lowering_checks import assert_like_eager, gradient


def data(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_products(dtype):
    a, b, c = ((data(*s) * 4).to(dtype) for s in ((5, 7), (7, 3), (5, 3)))
    assert_like_eager(torch.mm, a, b)
    assert_like_eager(lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), c, a, b)
    assert_like_eager(lambda c, a, b: torch.addmm(c[0], a, b), c, a, b)
    assert_like_eager(lambda a, b: torch.mv(a, b[:, 0]), a, b)
    assert_like_eager(lambda a, b: torch.dot(a[0], b[:, 0]), a, b)
    x, y = (data(2, *s).to(dtype) for s in ((5, 7), (7, 3)))
    assert_like_eager(torch.bmm, x, y)
    assert_like_eager(lambda c, x, y: torch.baddbmm(c, x, y, beta=2, alpha=3), c, x, y)
    assert_like_eager(lambda c, x, y: torch.addbmm(c, x, y, beta=2, alpha=3), c, x, y)


def test_float32_products_are_not_rounded_to_less():
    a, b = data(64, 512), data(512, 64)
    error = (run(torch.mm, a, b)[0].double() - a.double() @ b.double()).abs().max()
    assert error < 2e-4  # TF32 would be off by 1e-2


def test_complex():
    a = torch.complex(data(5, 7), data(7, 5).t())
    torch.testing.assert_close(run(lambda a: a @ a.mH, a)[0], a @ a.mH)
    torch.testing.assert_close(run(torch.vdot, a[0], a[1])[0], torch.vdot(a[0], a[1]))


def test_beta_zero_ignores_nan():
    fn = lambda c, a, b: torch.addmm(c, a, b, beta=0)  # noqa: E731
    assert_like_eager(fn, torch.full((5, 3), torch.nan), data(5, 7), data(7, 3))


def test_empty_inner_dimension_gives_zeros():
    assert_like_eager(torch.mm, torch.empty(2, 0), torch.empty(0, 3))


def test_bilinear():
    tensors = data(4, 5), data(4, 6), data(3, 5, 6)
    assert_like_eager(F.bilinear, *tensors)
    assert_like_eager(gradient(F.bilinear), *tensors)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf")])
def test_distances(p):
    x, y = data(4, 5), data(6, 5)
    y[1] = x[2]  # the gradient at distance 0 is 0
    assert_like_eager(lambda x, y: torch.cdist(x, y, p), x, y)
    assert_like_eager(gradient(lambda x, y: torch.cdist(x, y, p)), x, y)
    assert_like_eager(lambda x: F.pdist(x, p), y)
    assert_like_eager(gradient(lambda x: F.pdist(x, p)), y)
