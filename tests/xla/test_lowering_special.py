"""Special functions, against float64 and at their poles."""

import math

import pytest
import torch

from tests.xla.harness import run

special = torch.special
POLES = torch.tensor([0.0, -0.0, -1.0, -3.0, math.inf, -math.inf, math.nan])


def on(low, high, count=400):
    return torch.linspace(low, high, count)


CASES = {
    "erf": (torch.erf, on(-5, 5)),
    "erfc": (torch.erfc, on(-5, 9)),
    "erfcx": (special.erfcx, torch.cat([on(-4, 30), torch.tensor([1e3, 1e10])])),
    "erfinv": (torch.erfinv, on(-0.99999, 0.99999)),
    "lgamma": (torch.lgamma, on(-10.03, 30)),
    "digamma": (torch.digamma, on(-10.03, 30)),
    "trigamma": (lambda x: torch.polygamma(1, x), on(0.1, 30)),
    "polygamma4": (lambda x: torch.polygamma(4, x), on(0.1, 30)),
    "zeta": (lambda x: special.zeta(x, 2.5), on(1.1, 40)),
    "zeta_left_of_poles": (lambda q: special.zeta(3.0, q), on(-20.3, 10.2)),
    "igamma": (lambda x: special.gammainc(torch.full_like(x, 2.5), x), on(0.01, 30)),
    "igammac": (lambda x: special.gammaincc(torch.full_like(x, 2.5), x), on(0.01, 30)),
    "i0": (torch.i0, on(-30, 30)),
    "i0e": (special.i0e, on(-30, 30)),
    "i1": (special.i1, on(-30, 30)),
    "i1e": (special.i1e, on(-30, 30)),
    "ndtri": (special.ndtri, on(1e-4, 0.9999)),
    "bessel_j0": (special.bessel_j0, on(-30, 30)),
    "bessel_j1": (special.bessel_j1, on(-30, 30)),
    "bessel_y0": (special.bessel_y0, on(0.01, 30)),
    "bessel_y1": (special.bessel_y1, on(0.01, 30)),
    "k0": (special.modified_bessel_k0, on(0.01, 30)),
    "k1": (special.modified_bessel_k1, on(0.01, 30)),
    "scaled_k0": (special.scaled_modified_bessel_k0, on(0.01, 90)),
    "scaled_k1": (special.scaled_modified_bessel_k1, on(0.01, 90)),
    "spherical_bessel_j0": (special.spherical_bessel_j0, on(-30, 30)),
    "airy_ai": (special.airy_ai, on(-20, 9)),
}


@pytest.mark.parametrize("name", CASES)
def test_float32_results_are_rounded_float64_results(name):
    fn, x = CASES[name]
    (result,), truth = run(fn, x), fn(x.double())
    tolerance = 4e-7 if name == "erf" else 6.1e-8  # half a unit in the last place
    torch.testing.assert_close(result.double(), truth, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("name", ["lgamma", "digamma", "erf", "erfc", "erfcx", "i0e", "bessel_j1"])
def test_poles_and_infinities(name):
    fn = CASES[name][0]
    finite_at_infinity = name != "digamma"
    x = POLES if finite_at_infinity else POLES[:-2]
    (result,), expected = run(fn, x), fn(x)
    torch.testing.assert_close(result, expected, equal_nan=True)


POLYNOMIALS = [
    special.chebyshev_polynomial_t,
    special.chebyshev_polynomial_u,
    special.chebyshev_polynomial_v,
    special.chebyshev_polynomial_w,
    special.shifted_chebyshev_polynomial_t,
    special.shifted_chebyshev_polynomial_u,
    special.shifted_chebyshev_polynomial_v,
    special.shifted_chebyshev_polynomial_w,
    special.legendre_polynomial_p,
    special.laguerre_polynomial_l,
    special.hermite_polynomial_h,
    special.hermite_polynomial_he,
]


@pytest.mark.parametrize("polynomial", POLYNOMIALS, ids=lambda p: p.__name__)
def test_orthogonal_polynomials_of_every_degree(polynomial):
    x = torch.tensor([-1.5, -1.0, -0.7, 0.0, 0.3, 0.9999, 1.0, 2.0])
    degree = torch.tensor([-1.0, 0.0, 1.0, 2.0, 5.0, 9.0, 14.0, 20.0])
    x, degree = (a.contiguous() for a in torch.meshgrid(x, degree, indexing="ij"))
    (result,) = run(polynomial, x, degree)
    truth = polynomial(x.double(), degree.double())
    torch.testing.assert_close(result.double(), truth, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_hermite_polynomials_end_at_degree_128_in_float32_as_in_torch():
    x, degree = torch.tensor([0.5, 0.5]), torch.tensor([20.0, 129.0])
    (result,) = run(special.hermite_polynomial_he, x, degree)
    torch.testing.assert_close(
        result, special.hermite_polynomial_he(x, degree), equal_nan=True, rtol=1e-5, atol=0
    )
    assert result.isnan().tolist() == [False, True]


def test_integers_become_floats():
    x = torch.tensor([1, 2, 5])
    (result,) = run(torch.lgamma, x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.lgamma(x))
