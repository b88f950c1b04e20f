"""Each family of operators: values, types and strides are eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import backend_checks as checks

Case = tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]


def _pair() -> tuple[Tensor, ...]:
    return torch.randn(3, 4), torch.rand(4) + 0.5


def _exponentials(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.exp() - x.expm1(), y.log() + y.log1p() + y.log2(), y.rsqrt() * x.sigmoid(), x.erf()


def _trigonometry(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.sin() * y.cos(), x.tanh().atanh(), torch.atan2(x, y), y.lgamma()


def _comparison(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    low = x < y
    return low & (x > 0), ~low | (y != 1), torch.where(low, x, 2.0), x.clamp(-0.5, 0.5), x.isnan()


def _extremes(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    holes = torch.where(x > 1, float("nan"), x)
    return (
        torch.maximum(holes, y), torch.fmin(holes, y), holes.relu(), holes.clamp(min=0),
        holes.amax(1), holes.sign(), torch.copysign(y, x), x.signbit(),
        torch.copysign(x, -0.0), torch.nextafter(x, y),
    )  # fmt: skip


def _division(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        x / y, x // y, x % -y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc"), 3 / y,
        x // 0.3,
    )  # fmt: skip


def _powers(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return y**0.5, x**2, x**3, y**-1.5, y**x, 2.0**x, torch.hypot(x, y), x**0, x.round(decimals=2)


def _activations(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.elu(x), F.leaky_relu(x), F.mish(x),
        F.softplus(x), F.hardtanh(x), F.logsigmoid(x) * y,
    )  # fmt: skip


def _reductions(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        x.sum(), x.mean(1), x.sum((0, 1), keepdim=True), x.amin(0) + y, x.prod(1), (x > 0).any(1),
        (x > -9).all(), x.var(1), x.std(0, correction=0), x.norm(dim=1), x.norm(1, dim=0),
        x.unsqueeze(1).sum(1, keepdim=True), x.mean(), x.logsumexp(1),
    )  # fmt: skip


def _normalisation(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    images = torch.stack([x, x * 2 + 1, x * y, -x]).reshape(2, 4, 2, 3)
    return (
        F.layer_norm(x, (4,), y, y), x.softmax(0), F.log_softmax(x, 1),
        F.group_norm(images, 2, y, y),
        F.batch_norm(images, y, y, y, y), F.instance_norm(images), F.normalize(x),
        F.rms_norm(x, (4,), y),
    )  # fmt: skip


def _views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    both = torch.cat([x, x * y], 1)
    return (
        both.t() * 2, both[1:, 2:5] + 1, both.view(2, 12).sum(1),
        both.unsqueeze(1) * y.view(4, 1, 1)[:3],
        y.expand(3, 4) * x, F.pad(x, (1, 2, 0, 1), value=3.0), torch.stack([y, y + 1]).flatten(),
        both.chunk(2, 1)[1] * 2, both[1] - both[:, 0, None], y.repeat(2, 3) + 1, x.squeeze() * 2,
        torch.zeros(3, 4).copy_(y) + 1,
    )  # fmt: skip


def _products(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    batch = torch.stack([x, x + 1])
    return (
        x @ x.t(), batch @ batch.mT, F.linear(x, x, y[:3]),
        torch.addmm(x @ x.t(), x, x.t(), beta=2),
        torch.mv(x, y) * 2, torch.addmv(y[:3], x, y, alpha=2), torch.dot(y, y) + 1,
        torch.addbmm(x @ x.t(), batch, batch.mT, beta=0.5),
        torch.baddbmm(batch[:, :, :3], batch, batch.mT),
    )  # fmt: skip


def _factories(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    ones = torch.ones_like(x)
    return x + torch.arange(4), ones * 2 + y, torch.full((3, 1), 2.5) * x, torch.zeros_like(y) - y


def _integers(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x + 1, x * x - 3, x // 3, x % -3, x.abs(), -x, x & 6, x | 1, ~x, x.sum(), x.amax(), x / 4,
        x > 0, x.clamp(0, 5), x**2, x.float().mean(), x.to(torch.int32) * 2, x.fmod(4), x.prod(),
    )  # fmt: skip


def _booleans(x: Tensor) -> tuple[Tensor, ...]:
    y = x.flip(0)
    return x & y, x | ~y, x ^ y, x + y, x * y, x.sum(), x.float().mean(), x.any(), x.all(), x == y


FAMILIES: dict[str, Case] = {
    "exponentials": (_exponentials, _pair),
    "trigonometry": (_trigonometry, _pair),
    "comparison": (_comparison, _pair),
    "extremes": (_extremes, _pair),
    "division": (_division, _pair),
    "powers": (_powers, _pair),
    "activations": (_activations, _pair),
    "reductions": (_reductions, _pair),
    "normalisation": (_normalisation, _pair),
    "views": (_views, _pair),
    "products": (_products, _pair),
    "factories": (_factories, _pair),
    "integers": (_integers, lambda: (torch.tensor([[7, -8, 0], [1, 2**40, -3]]),)),
    "booleans": (_booleans, lambda: (torch.tensor([True, False, True, True]),)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(nvfuser: str, family: str):
    fn, inputs = FAMILIES[family]
    with torch.no_grad():
        reports = checks.agree("nvfuser", fn, *inputs(), min_block_size=1, fragmented="keep")
    eager = {f.op: f.reason for r in reports for f in r.fallbacks}
    assert set(eager) <= {"aten.flip.default"}, eager


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_of_floating_point(nvfuser: str, dtype: torch.dtype):
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (
            x * 1.1 + y, (x > 0.1) & (y < x), x.sum(1), F.layer_norm(x, (4,)), x.softmax(1),
            x.mean(),
            F.gelu(x) * 2, torch.cat([x, x.float()]), x.to(torch.float32).exp(), x @ x.t(), x / 3,
            F.linear(x, x, y[:3]), torch.logical_not(x), x.bool(), x.isinf(), x.round(decimals=1),
        )  # fmt: skip

    inputs = torch.randn(3, 4, dtype=dtype), torch.randn(4, dtype=dtype)
    with torch.no_grad():
        reports = checks.agree("nvfuser", fn, *inputs, min_block_size=1)
    assert checks.ran_on_backend(reports)


def test_types_are_promoted_as_torch_does(nvfuser: str):
    def fn(x: Tensor, n: Tensor, flag: Tensor, half: Tensor) -> tuple[Tensor, ...]:
        return x + n, n * 2.5, flag * 3, half + x, half * n, n / 2, flag + flag, x > n, n + half

    inputs = (
        torch.randn(5), torch.tensor([2**40 + 1, -3, 0, 1, 7]), torch.rand(5) > 0.5,
        torch.randn(5).half(),
    )  # fmt: skip
    with torch.no_grad():
        reports = checks.agree("nvfuser", fn, *inputs, min_block_size=1)
    assert checks.ran_on_backend(reports)


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "a sort": (lambda x: x.sort()[0], ((3, 4), torch.float32), "it has no lowering to nvFuser"),
    "8 bit integers": (
        lambda x: x + 1, ((3, 4), torch.uint8), "nvFuser does not compute with torch.uint8"
    ),
    "complex numbers": (
        lambda x: x * 2, ((3, 4), torch.complex64), "nvFuser does not compute with torch.complex64"
    ),
    "nothing": (lambda x: x * 2, ((0, 4), torch.float32), "a tensor has no elements"),
    "9 dimensions": (
        lambda x: x * 2, ((1,) * 9, torch.float32), "a tensor has 9 dimensions, and nvFuser takes 8"
    ),
    "an unknown divisor": (
        lambda x: x // x.abs().clamp(min=1), ((3,), torch.int64), "torch raises where an integer"
    ),
    "steps": (lambda x: x[::2] * 2, ((4,), torch.float32), "nvFuser slices with steps of 1 only"),
    "a half correction": (
        lambda x: x.var(0, correction=0.5), ((4,), torch.float32), "does not support correction=0.5"
    ),
    "integer products": (
        lambda x: x @ x, ((2, 2), torch.int64), "products of integer matrices are left to eager"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_stays_in_eager_says_why(nvfuser: str, what: str):
    fn, (shape, dtype), text = REFUSED[what]
    x = torch.ones(shape, dtype=dtype)
    with torch.no_grad():
        reports = checks.agree("nvfuser", fn, x, min_block_size=1)
    reasons = [f.reason for r in reports for f in r.fallbacks]
    assert any(text in reason for reason in reasons), reasons
