"""Formulas in the place of lowerings: all digits, NaN and 64 bits, which usual values hide."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynamo_backends
from dynamo_backends.onnx import lowering
from dynamo_backends.onnx.formulas import FORMULAS, apply_formulas

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


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (4, 1)])
@pytest.mark.parametrize("order", [2, 1, 3, 0, INF])
def test_norms_overflow_where_eagers_do(shape: tuple[int, ...], order: float):
    x = torch.zeros(shape)
    with torch.no_grad():
        for value in (1e30, 1e20, 1e18, 1e-22, 1e-30, INF, NAN):
            x[0, 0] = value
            for dim in (0, 1, (0, 1)):
                function = lambda x, d=dim: torch.linalg.vector_norm(x, order, d) * 1.0  # noqa: E731
                assert_same(compiled(function)(x), function(x))


@pytest.mark.parametrize("correction", [0, 1])
def test_standard_deviations_of_large_and_small_numbers(correction: int):
    x = torch.tensor([[1e25, 1.0, -1e25], [1e-30, 1e-25, 0.0], [1.0, INF, 2.0], [3.0, 3.0, 3.0]])
    with torch.no_grad():
        for dim in (0, 1, -1):
            function = lambda x, d=dim: x.std(d, correction=correction) * 1.0  # noqa: E731
            assert_same(compiled(function)(x), function(x))


@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_of_infinities(keepdim: bool):
    rows = [
        [-INF, 3.0],
        [INF, 3.0],
        [-INF, -INF],
        [INF, -INF],
        [NAN, 1.0],
        [NAN, INF],
        [90.0, 90.0],
    ]
    x = torch.tensor(rows)
    with torch.no_grad():
        for dim in (0, 1, (0, 1)):
            function = lambda x, d=dim: x.logsumexp(d, keepdim) * 1.0  # noqa: E731
            assert_same(compiled(function)(x), function(x))


def test_products_of_integers_have_64_bits():
    x = torch.tensor([[2**31 - 2] * 3, [3, -5, 7], [2**31 - 1, -(2**31), 2]])
    with torch.no_grad():
        for dtype in (torch.int64, torch.int32, torch.uint8):
            given = x.to(dtype)
            function = lambda x: (x.prod(), x.prod(0), x.prod(1, True), x[:0].prod(0) + 1)  # noqa: E731
            for result, expected in zip(compiled(function)(given), function(given), strict=True):
                assert torch.equal(result, expected)


@pytest.mark.parametrize("kernel", [(2,), (3, 2), (3, 2, 1), (2, 1, 1, 2)])
def test_pools_of_rows_see_nan(kernel: tuple[int, ...]):
    x = torch.randn(2, 3, 12)
    x[0, 0, 5], x[1, 2, 0], x[0, 1], x[1, 1, 3] = NAN, NAN, -INF, INF
    with torch.no_grad():
        function = lambda x: F.max_pool1d(x, *kernel) * 1.0  # noqa: E731
        assert_same(compiled(function)(x), function(x))


def test_hyperbolic_tangents_have_all_digits_where_it_shows():
    x = torch.cat(
        [torch.linspace(-12, 12, 20001), torch.logspace(-40, 0, 2001), torch.tensor(HARD)]
    )
    expected = x.double().tanh()
    rounding = 2.0 ** (expected.abs().clamp(1e-38).log2().floor() - 23)
    formula = FORMULAS[torch.ops.aten.tanh.default].function(x)
    error = ((formula.double() - expected) / rounding).abs().nan_to_num(0)
    assert error.max() < 2, x[error.argmax()]
    assert torch.equal(formula.isnan(), x.isnan())
    x = x[x.isfinite() & (x.abs() > 1e-37)]
    with torch.no_grad():
        for function in (lambda x: 1 - x.tanh(), lambda x: x - x.tanh(), lambda x: 1 / x.tanh()):
            exact = function(x.double())
            error = (compiled(function)(x).double() - exact).abs()
            own = (function(x).double() - exact).abs()
            assert (error <= 3 * own + 2e-7 * (1 + exact.abs())).all()


def test_gradients_of_tanh_are_exact_near_1():
    x = torch.linspace(-7, 7, 301, requires_grad=True)
    (expected,) = torch.autograd.grad(x.tanh().sum(), x)
    (gradient,) = torch.autograd.grad(compiled(lambda x: x.tanh() * 1.0)(x).sum(), x)
    exact = 1 - x.double().tanh() ** 2
    error, own = ((g - exact).abs() for g in (gradient, expected))
    assert (error <= 3 * own + 1.2e-7).all()


PAIRED = (0.0, -0.0, 1.0, -1.0, 0.5, -3.0, INF, -INF, NAN, 1e30, -1e30, 1e-30, 7.3)


@pytest.mark.parametrize("name", ["copysign", "hypot", "atan2", "fmax", "fmin"])
def test_functions_of_two_numbers(name: str):
    x = torch.tensor(PAIRED).repeat_interleave(len(PAIRED))
    y = torch.tensor(PAIRED).repeat(len(PAIRED))
    function = getattr(torch, name)
    with torch.no_grad():
        assert_same(compiled(lambda x, y: function(x, y) * 1.0)(x, y), function(x, y))


def test_nan_is_the_largest_number():
    x = torch.tensor([[NAN, INF, 3.4028e38, -INF, 1.0, NAN], [-INF, NAN, 0.0, 5.0, -1.0, INF]])

    def function(x: Tensor) -> list[Tensor]:
        rows = [x.sort().values, x.sort(0, True).values, x.gather(1, x.argsort(1))]
        return [*rows, x.topk(3).values, x.topk(6, largest=False).values, x.max(), x[1, 2:].min()]

    with torch.no_grad():
        for result, expected in zip(compiled(function)(x), function(x), strict=True):
            assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_signs_of_zeros(dtype: torch.dtype):
    x = torch.tensor(HARD[:-1], dtype=dtype)
    with torch.no_grad():
        assert torch.equal(compiled(lambda x: ~x.signbit())(x), ~x.signbit())


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


class Gates(torch.nn.Module):
    """A block of EfficientNet; what it returns besides is read by no convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1)
        self.gate = torch.nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        y = F.silu(x)
        gated = y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid()
        return self.last(gated), F.silu(x.amax((2, 3)))


def test_sigmoids_between_convolutions_are_the_kernels(monkeypatch: pytest.MonkeyPatch):
    graphs: list[list[str]] = []

    def noting(module: torch.fx.GraphModule, kind: str) -> None:
        apply_formulas(module, kind)
        graphs.append([str(n.target) for n in module.graph.nodes])

    monkeypatch.setattr(lowering, "apply_formulas", noting)
    model, x = Gates(), torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        for result, expected in zip(compiled(model)(x), model(x), strict=True):
            torch.testing.assert_close(result, expected)
    counts = [graphs[-1].count(f"aten.{name}.default") for name in ("silu", "sigmoid", "exp")]
    assert counts == [1, 1, 1]
