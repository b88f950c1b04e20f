"""What TVM is not given, and why; what replaces its own conversions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynamo_backends.runtime.verdicts import VerdictStore
from dynamo_backends.tvm import trial
from dynamo_backends.tvm.elementwise import ELEMENTWISE
from dynamo_backends.tvm.exclusions import WHOLE, whole_operators
from tests.checking import check

NAN, INF = float("nan"), float("inf")


def reasons(fn: Any, *inputs: Tensor) -> dict[str, str]:
    """Why operators of a function run in eager; its result is checked."""
    reports = check(fn, *inputs, ops_in_eager=None, backend="tvm", min_block_size=1, cache=False)
    return {f.op: f.reason for r in reports for f in r.fallbacks}


@pytest.mark.parametrize(
    ("fn", "x", "reason"),
    [
        (torch.special.bessel_j0, torch.rand(4), "TVM's importer has no conversion of it"),
        (lambda x: x * 2, torch.rand(4).cfloat(), "TVM does not compute with torch.complex64"),
        (lambda x: x // x, torch.tensor([5, -3]), "an integer division by zero"),
        (
            lambda x: F.max_pool3d(x, (1, 2, 2), return_indices=True),
            torch.ones(1, 1, 2, 4),
            "its conversion returns only the first result",
        ),
    ],
    ids=["no conversion", "complex", "division", "positions"],
)
def test_a_refusal_has_its_reason(fn: Any, x: Tensor, reason: str):
    assert any(reason in found for found in reasons(fn, x).values())


@pytest.mark.parametrize(
    "fn",
    [
        torch.relu,
        lambda x: x.clamp(-1, 2),
        lambda x: F.hardtanh(x) + x.clamp_min(0) + x.clamp_max(0.5),
        lambda x: torch.maximum(x, x.flip(0)) + torch.minimum(x, x.flip(0)),
        lambda x: (x.amax(-1), x.amin(0)),
        lambda x: (x != x, x != 1),
        lambda x: (x.abs().log1p(), x.expm1(), x.erfc(), x.lgamma()),
        lambda x: (x**2, x**3, x**4, x**0.5, x**-0.5, x**-1, x.exp2()),
        lambda x: (x.argmax(-1), x.argmin(-1), x.max(-1), x.min(-1), x.sort(-1).values),
        lambda x: (x.topk(2).values, x.std(-1), x.var(-1), torch.var_mean(x, 0)),
        lambda x: (x * 0.0, x * -0.0, x.signbit(), torch.copysign(x, -x), torch.fmax(x, -x)),
        lambda x: (F.elu(x), torch.remainder(x, x.flip(0)), x.hypot(-x)),
        lambda x: (x.norm(dim=-1), x.norm(1, -1), x.norm(INF, -1), x.prod(-1)),
        lambda x: (F.max_pool1d(x, 2), F.max_pool2d(x[None], 3, 1, 1)),
    ],
)
def test_what_replaces_tvms_own_conversions_keeps_nan_and_digits(fn: Any):
    x = torch.tensor([[NAN, 1e-9, 6.0, -1e-6], [0.0, -3.0, 1.5, INF]])
    assert reasons(fn, x) == {}


def pools(x: Tensor) -> tuple[Tensor, ...]:
    """Of one to three dimensions, with and without positions, by windows and by sizes."""
    return (
        F.max_pool1d(x, 2),
        F.max_pool1d(x, 3, 2, 1, ceil_mode=True),
        F.max_pool2d(x, (3, 2), (2, 1), (1, 0), (2, 1)),
        F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        F.max_pool3d(x[None], (1, 2, 2)),
        F.max_pool3d(x[None], 3, 2, 1, ceil_mode=True),
        *F.max_pool1d(x, 2, return_indices=True),
        *F.max_pool2d(x, 2, return_indices=True),
        *F.max_pool3d(x[None], 2, return_indices=True),
        F.adaptive_max_pool1d(x, 3),
        *F.adaptive_max_pool2d(x, 3, return_indices=True),
        F.adaptive_max_pool3d(x[None], 2),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_maximum_pools_keep_nan_and_infinities(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    compiled = torch.compile(
        pools, backend="tvm", options={"min_block_size": 1, "verify": "off", "cache": False}
    )
    x = torch.randn(3, 8, 9, generator=generator).to(dtype)
    compiled(x)
    for value in (NAN, INF, -INF):
        rare = torch.where(torch.rand(x.shape, generator=generator) < 0.1, value, x)
        for hard in (rare, torch.full_like(x, value)):
            for result, expected in zip(compiled(hard), pools(hard), strict=True):
                torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ceil", [False, True])
def test_maximum_pools_of_sizes_that_vary(ceil: bool):
    compiled = torch.compile(
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=ceil),
        backend="tvm",
        dynamic=True,
        options={"min_block_size": 1, "verify": "off", "cache": False},
    )
    for shape in ((2, 3, 8, 8), (3, 4, 9, 12), (5, 4, 7, 6), (1, 2, 10, 11)):
        x = torch.randn(shape)
        x[0, 0, 0, 0], x[0, 1, 2] = NAN, -INF
        expected = F.max_pool2d(x, 3, 2, 1, ceil_mode=ceil)
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_maximum_pools_of_integers(dtype: torch.dtype):
    least = torch.iinfo(dtype).min
    x = torch.full((1, 2, 4, 5), least, dtype=dtype)
    x[..., ::3] = least + 1
    assert reasons(lambda x: F.max_pool2d(x, 3, 2, 1), x) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_functions_of_the_c_library_keep_the_sign_of_zero(dtype: torch.dtype):
    x = torch.tensor([-0.0, 0.0, 0.5, -0.25, 1.0, NAN], dtype=dtype)
    assert reasons(lambda x: (1 / x.atanh(), 1 / x.expm1(), 1 / x.log1p()), x) == {}


def test_tanh_keeps_the_sign_of_zero():
    assert reasons(lambda x: 1 / x.tanh(), torch.tensor([-0.0, 0.0, 0.5, NAN])) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_of_small_numbers_has_all_digits(dtype: torch.dtype):
    x = torch.logspace(-30, 1, 2000, dtype=dtype)
    x = torch.cat([x, -x])
    result = torch.compile(lambda x: (x * 1).tanh(), backend="tvm")(x)
    torch.testing.assert_close(result, x.tanh(), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_nan_fails_a_comparison_that_is_negated_in_the_same_loop():
    x = torch.tensor([[NAN, 1.0], [NAN, 2.0], [3.0, 4.0]])
    assert (
        reasons(lambda x: ((x == 3).logical_not(), (x < 3).logical_not(), x.logical_not()), x) == {}
    )
    assert reasons(lambda x: (x == 3).all(0), x) == {}


def test_every_operator_that_is_taken_whole_exists():
    assert len(whole_operators()) == len(WHOLE)


def test_a_wrong_conversion_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def squared(importer: Any, node: Any) -> Any:
        (x,) = importer.retrieve_args(node)
        from dynamo_backends.tvm.vendor import relax

        return importer.emit(relax.op.multiply(x, x))

    monkeypatch.setitem(ELEMENTWISE, "relu.default", squared)
    monkeypatch.setattr(trial, "_verdicts", VerdictStore("tvm", (), shipped=False))
    assert "in a trial TVM's output 0" in reasons(torch.relu, torch.randn(30))["aten.relu.default"]


def test_sums_and_norms_are_not_cancelled():
    x = torch.tensor([[3.0, float("nan"), INF, 1e30]])
    y = torch.tensor([[1e20, 1.0, 2.0, 1e30]])

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x + y) - y, x - x * 1.0, x[:, 3:].norm(dim=1), x[:, 3:] / x[:, 3:].norm(dim=0)

    assert reasons(fn, x, y) == {}


def test_extrema_begin_with_infinities():
    x = torch.full((2, 3), -INF)
    for fn in (lambda x: x.amax(-1), lambda x: (-x).amin(-1), lambda x: x.max(-1)):
        assert reasons(fn, x) == {}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_are_shifted_and_negated_as_in_eager(dtype: torch.dtype):
    info = torch.iinfo(dtype)
    x = torch.tensor([[info.max, info.min, 1, 0], [3, info.max - 1, info.min + 1, 7]], dtype=dtype)
    assert reasons(lambda x: (x << 1, x << 33, x >> 1, x >> 65, -x, x.sign()), x) == {}
    assert reasons(lambda x: (x == 128, x + 128, x == -3, x.sort(-1).values, x.max(-1)), x) == {}
