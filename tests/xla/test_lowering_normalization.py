"""Softmax and normalisation with their gradients, in both memory layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dynamo_backends.xla.lowering import batch_norm, normalization
from dynamo_backends.xla.lowering.values import ChannelsLast
from tests.xla.harness import run

WEIGHT, BIAS = torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6)

NORMALISATIONS = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmin": lambda x: F.softmin(x, dim=0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "layer_norm_2d": lambda x: F.layer_norm(x, x.shape[-2:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 3),
    "instance_norm": lambda x: F.instance_norm(x),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}


def with_gradients(fn):
    def both(x, *rest):
        out, pullback = torch.func.vjp(fn, x, *rest)
        cotangent = torch.cos(torch.arange(out.numel(), device=out.device)).reshape(out.shape)
        return out, *pullback(cotangent.to(out.dtype))

    return both


def assert_close_to_float64(fn, *inputs, tolerance=None):
    exact = fn(*(i.double() for i in inputs))
    tolerance = tolerance or (2e-5 if inputs[0].dtype is torch.float32 else 2**-6)
    for result, truth in zip(run(fn, *inputs), exact, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NORMALISATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward(name, dtype):
    assert_close_to_float64(with_gradients(NORMALISATIONS[name]), torch.randn(4, 6, 5, 8).to(dtype))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        lambda x, w, b: F.rms_norm(x, (6,), w * b),
        lambda x, w, b: F.group_norm(x.transpose(1, -1), 2, w, b),
        lambda x, w, b: F.batch_norm(x.transpose(1, -1), None, None, w, b, training=True),
    ],
)
def test_gradients_of_weight_and_bias(fn):
    assert_close_to_float64(with_gradients(fn), torch.randn(4, 5, 6), WEIGHT, BIAS)


def test_batch_norm_in_inference():
    mean, var = torch.randn(6), torch.rand(6) + 0.1

    def inference(x, w, b, mean, var):
        return with_gradients(lambda x, w, b: F.batch_norm(x, mean, var, w, b))(x, w, b)

    assert_close_to_float64(inference, torch.randn(4, 6, 5), WEIGHT, BIAS, mean, var)


def test_batch_norm_updates_running_statistics_with_the_unbiased_variance():
    op = torch.ops.aten._native_batch_norm_legit_functional.default
    x, mean, var = torch.randn(4, 6, 5), torch.randn(6), torch.rand(6)
    args = (x, WEIGHT, BIAS, mean, var, True, 0.1, 1e-5)
    for result, expected in zip(run(op, *args), op(*args), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_statistics_survive_a_large_mean():
    x = torch.randn(8, 6, 16) + 1e3
    for fn in (NORMALISATIONS["batch_norm"], NORMALISATIONS["layer_norm"]):
        assert_close_to_float64(lambda x, fn=fn: [fn(x)], x, tolerance=1e-3)


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_2d", "group_norm"])
@pytest.mark.parametrize("value", [-6.48, 1000.7])
def test_equal_values_are_normalised_to_zero(name, value):
    """1/std is 316 there, which a rounded mean would be seen by."""
    (result,) = run(lambda x: [NORMALISATIONS[name](x)], torch.full((3, 6, 7, 5), value))
    assert result.abs().max() < 1e-6


def test_softmax_of_masked_and_extreme_rows():
    inf = float("inf")
    x = torch.tensor([[1e30, 1e30, -inf], [-inf, -inf, -inf], [1.0, float("nan"), 2.0]])
    for fn in (lambda x: x.softmax(1), lambda x: x.log_softmax(1)):
        torch.testing.assert_close(run(fn, x)[0], fn(x), equal_nan=True)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (0, 3)])
def test_softmax_of_scalars_and_nothing(shape):
    x = torch.ones(shape)
    torch.testing.assert_close(run(lambda x: x.softmax(-1), x)[0], x.softmax(-1))


def test_softmax_to_float32():
    x = torch.randn(3, 100).bfloat16()
    (result,) = run(lambda x: x.softmax(1, dtype=torch.float32), x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, x.float().softmax(1))


def _both_layouts(fn):
    """Results for a logical and for a channels-last input, both in torch's dimension order."""
    x = np.random.default_rng(0).normal(size=(2, 6, 5, 4)).astype(np.float32)
    with jax.enable_x64(True):
        plain = fn(jnp.asarray(x))
        last = fn(ChannelsLast(jnp.moveaxis(jnp.asarray(x), 1, -1)))
    assert isinstance(last[0], ChannelsLast)
    assert not isinstance(plain[0], ChannelsLast)
    return plain, [jnp.moveaxis(v.array, -1, 1) if isinstance(v, ChannelsLast) else v for v in last]


def _vectors():
    return jnp.asarray(WEIGHT.numpy()), jnp.asarray(BIAS.numpy())


def test_layouts_agree_and_are_kept():
    weight, bias = _vectors()
    mask = [True, True, True]

    def batch(x):
        out, mean, invstd = batch_norm.batch_norm_training(x, weight, bias, None, None, 0.1, 1e-5)[
            :3
        ]
        grads = batch_norm.native_batch_norm_backward(
            out, x, weight, None, None, mean, invstd, True, 1e-5, mask
        )
        return grads[0], out.array if isinstance(out, ChannelsLast) else out, *grads[1:]

    def group(x):
        out, mean, rstd = normalization.group_norm(x, weight, bias, 2, 6, 20, 3, 1e-5)
        return normalization.group_norm_backward(out, x, mean, rstd, weight, 2, 6, 20, 3, mask)

    for fn in (batch, group):
        plain, last = _both_layouts(fn)
        for a, b in zip(plain, last, strict=True):
            b = jnp.moveaxis(b, -1, 1) if a.shape != b.shape else b
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [1e3, 1e15, 2e21, -1e30])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.softmax(0),
        lambda x: x.log_softmax(0),
        lambda x: x.logsumexp(0),
        lambda x: F.softmin(x, 1),
    ],
)
def test_softmax_of_a_product_subtracts_the_product_that_was_rounded(fn, value):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)) * value
    for scaled in (lambda x: x * 20.3, lambda x: x * x * x):
        (result,) = run(lambda x, s=scaled: fn(s(x)), x)
        torch.testing.assert_close(result, fn(scaled(x)), equal_nan=True)


def test_rows_whose_squares_overflow_are_zeros():
    x = torch.tensor([[-120.0, -1e30, 0.0, 0.0, 20.0, 0.0, -16777217.0, 2147483648.0]])
    (result,) = run(lambda x: F.layer_norm(x, (8,)), x)
    torch.testing.assert_close(result, F.layer_norm(x, (8,)))
