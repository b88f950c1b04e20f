"""Activations and their gradients, against eager in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.xla.harness import run

FUNCTIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 1.5),
    "softplus": lambda x: F.softplus(x, beta=2, threshold=3),
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "selu": F.selu,
    "celu": F.celu,
    "glu": lambda x: F.glu(x, 0),
}


def gradient(fn):
    def both(x, cotangent):
        out, pullback = torch.func.vjp(fn, x)
        return out, *pullback(cotangent[: len(out)])

    return both


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [torch.randn(200, generator=generator) * 3, torch.tensor([0.0, 40.0, -40.0, -0.5])]
    )
    return x, torch.randn(x.shape, generator=generator)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward(name, dtype, samples):
    fn = gradient(FUNCTIONS[name])
    inputs = [s.to(dtype) for s in samples]
    exact = fn(*(i.double() for i in inputs))
    for result, truth in zip(run(fn, *inputs), exact, strict=True):
        assert result.dtype == dtype
        # In bfloat16 the gradients of tanh and sigmoid start from a rounded output, as in eager.
        tolerance = 4e-6 if dtype is torch.float32 else 2**-6
        torch.testing.assert_close(result.double(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", ["relu", "silu", "gelu", "hardtanh", "leaky_relu", "elu", "sigmoid"]
)
def test_nan_stays(name):
    (result,) = run(FUNCTIONS[name], torch.tensor([float("nan"), 1.0]))
    assert result.isnan().tolist() == [True, False]


def test_integers_keep_their_dtype():
    x = torch.tensor([-3, 0, 9])
    for fn in (F.relu, F.hardtanh):
        (result,) = run(fn, x)
        assert torch.equal(result, fn(x))
        assert result.dtype == torch.int64


def test_tanh_is_right_to_the_last_place_near_one():
    """1 - tanh(x)**2, by which gradients are multiplied, is nothing but rounding there."""
    small = torch.logspace(-30, 0, 10_000)
    x = torch.cat([torch.linspace(-12, 12, 200_001), small, -small])
    compiled = torch.compile(torch.tanh, backend="openxla", options={"verify": "off"})
    with torch.no_grad():
        found = compiled(x)
        special = compiled(torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e30, -1e30]))
    exact = x.double().tanh()
    rounded = exact.float()
    last_place = (torch.nextafter(rounded.abs(), torch.tensor(2.0)) - rounded.abs()).double()
    assert ((found.double() - exact).abs() / last_place).max() < 2
    expected = torch.tensor([1.0, -1.0, torch.nan, 0.0, -0.0, 1.0, -1.0])
    torch.testing.assert_close(special, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(special.signbit(), expected.signbit())
