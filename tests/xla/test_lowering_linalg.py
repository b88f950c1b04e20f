"""Factorisations are compared by what they mean, solutions with float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamo_backends.interface.errors import LoweringError
from tests.checking import check
from tests.xla.harness import run

linalg = torch.linalg
DTYPES = [torch.float32, torch.float64, torch.complex64]


def matrix(dtype, *shape):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def definite(dtype, *batch):
    a = matrix(dtype, *batch, 4, 4)
    return a @ a.mH + 4 * torch.eye(4, dtype=dtype)


def wide(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def assert_close_to_float64(fn, *inputs, tolerance=1e-4):
    exact = fn(*map(wide, inputs))
    exact = [exact] if isinstance(exact, torch.Tensor) else list(exact)
    for result, truth in zip(run(fn, *inputs), exact, strict=True):
        torch.testing.assert_close(wide(result), wide(truth), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (3,), (0,)])
@pytest.mark.parametrize(
    "fn",
    [
        lambda a: linalg.inv_ex(a)[0],
        lambda a: linalg.solve_ex(a, a.mH)[0],
        lambda a: linalg.solve_ex(a, a.mH, left=False)[0],
        lambda a: linalg.solve_ex(a.mT, a)[0],
        linalg.det,
        linalg.slogdet,
        linalg.lu,
        lambda a: linalg.cholesky_ex(a)[0],
        lambda a: linalg.cholesky_ex(a, upper=True)[0],
        linalg.matrix_exp,
        linalg.pinv,
        lambda a: linalg.pinv(a, hermitian=True),
        linalg.eigvalsh,
        linalg.svdvals,
        lambda a: linalg.qr(a, mode="complete"),
        lambda a: linalg.qr(a, mode="r")[1],
        lambda a: torch.geqrf(a),
        lambda a: linalg.solve_triangular(a, a.mH, upper=True),
        lambda a: linalg.solve_triangular(a, a, upper=False, left=False, unitriangular=True),
        lambda a: torch.cholesky_solve(a, linalg.cholesky_ex(a)[0]),
    ],
)
def test_equals_float64(fn, dtype, batch):
    a = definite(dtype, *batch)
    assert_close_to_float64(fn, a, tolerance=1e-3 if fn is linalg.matrix_exp else 1e-4)


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 5), (2, 4, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_singular_value_decomposition(shape, dtype):
    a = matrix(dtype, *shape)
    u, s, vh = run(lambda a: linalg.svd(a, full_matrices=False), a)
    torch.testing.assert_close(u * s[..., None, :].to(dtype) @ vh, a, rtol=1e-4, atol=1e-5)
    assert (s.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("uplo", ["L", "U"])
def test_eigh_reads_one_triangle_only(uplo):
    a = matrix(torch.float64, 4, 4)
    values, vectors = run(lambda a: linalg.eigh(a, UPLO=uplo), a)
    half = a.tril() if uplo == "L" else a.triu()
    whole = half + half.mT - torch.diag(a.diag())
    torch.testing.assert_close(whole @ vectors, vectors * values)


@pytest.mark.parametrize("fn", [linalg.eigh, linalg.svd, linalg.eig])
def test_vectors_without_a_unique_sign_are_left_to_eager(fn: Callable[..., Any]):
    assert check(fn, matrix(torch.float64, 5, 5), ops_in_eager=1)[0].fallbacks


def test_values_alone_are_native():
    check(linalg.eigvalsh, matrix(torch.float64, 5, 5))
    check(linalg.svdvals, matrix(torch.float64, 5, 4))


def test_info_tells_which_pivot_failed():
    a = torch.stack([torch.eye(4), torch.diag(torch.tensor([1.0, 2, -1, 3])), torch.ones(4, 4)])
    for fn in (linalg.cholesky_ex, linalg.inv_ex, linalg.lu_factor_ex):
        assert torch.equal(run(fn, a)[-1], fn(a)[-1])


def test_determinants_of_singular_matrices():
    a = torch.stack([torch.zeros(3, 3), torch.ones(3, 3), torch.eye(3)])
    for fn in (linalg.det, linalg.slogdet):
        expected = fn(a)
        expected = [expected] if isinstance(expected, torch.Tensor) else expected
        for result, truth in zip(run(fn, a), expected, strict=True):
            torch.testing.assert_close(result, truth)


def test_what_raises_on_singular_input_is_left_to_torch():
    # Before torch 2.13 a traced linalg.cholesky does not check its input, whoever compiles it.
    checked = [linalg.cholesky] if torch.__version__ >= "2.13" else []
    for fn in (torch.cholesky_inverse, *checked):
        with pytest.raises(LoweringError, match="has no lowering"):
            run(fn, torch.eye(3))


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(
            linalg.det,
            marks=pytest.mark.skipif(
                torch.__version__ >= "2.15",
                reason="from torch 2.15 on it raises on singular input, which is left to torch",
            ),
        ),
        lambda a: linalg.inv_ex(a)[0],
        lambda a: linalg.cholesky_ex(a)[0],
        lambda a: linalg.eigvalsh(a),
        linalg.matrix_exp,
    ],
)
def test_gradients(fn):
    def gradient(a):
        out, pullback = torch.func.vjp(fn, a)
        return pullback(torch.ones_like(out))[0]

    a = definite(torch.float32) / 8
    assert_close_to_float64(gradient, a, tolerance=1e-3)
    assert_close_to_float64(gradient, a.mT, tolerance=1e-3)  # factorised the other way round


@pytest.mark.parametrize("norm", ["backward", "forward", "ortho"])
@pytest.mark.parametrize("n", [None, 7, 12])
def test_fourier_transforms(norm, n):
    x = torch.randn(3, 10, dtype=torch.float64)
    for fn in (
        lambda x: torch.fft.fft(x, n=n, norm=norm),
        lambda x: torch.fft.rfft(x, n=n, dim=0, norm=norm),
        lambda x: torch.fft.irfft(x, n=n, norm=norm),
        lambda x: torch.fft.hfft(x, n=n, norm=norm),
        lambda x: torch.fft.ihfft(x, n=n, norm=norm),
    ):
        torch.testing.assert_close(run(fn, x)[0], fn(x))


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_fourier_transforms_of_several_dimensions(ndim):
    x = torch.randn((2, 3, 4, 5)[:ndim], dtype=torch.float64)
    for fn in (torch.fft.fftn, torch.fft.rfftn, torch.fft.irfftn, torch.fft.ifftn):
        torch.testing.assert_close(run(fn, x)[0], fn(x))
