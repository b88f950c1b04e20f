"""Operations that OpenVINO gets wrong: they are taken, and computed as eager does."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dynamo_backends

NAN, INF = float("nan"), float("inf")
HARD = torch.tensor(
    [0.0, 1.0, -1.0, 10.4, 18.5, -18.5, 86.0, -86.0, 100.0, -100.0, 1e4, -1e4, 65520.0, 16777217.0,
     1e-6, -1e-6, 1e20, -1e20, INF, -INF, NAN, 0.3, -0.3, 0.5]
)  # fmt: skip
ROWS = torch.stack([HARD.nan_to_num(2.0, 3.0, -3.0), HARD, HARD.flip(0), torch.full((24,), -INF)])
ROWS[2, ROWS[2].isnan()] = 5.0


def compared(fns: Sequence[Callable[..., Any]], *inputs: Tensor, taken: bool = True) -> None:
    """Functions, compiled as one, are right, and none of them runs in eager."""
    options = {"min_block_size": 1, "verify": "off"}
    torch._dynamo.reset()

    def all_of(*values: Tensor) -> list[Any]:
        return [fn(*values) for fn in fns]

    with torch.no_grad(), dynamo_backends.record() as reports:
        results = torch.compile(all_of, backend="ov", options=options)(*inputs)
        for i, (fn, found) in enumerate(zip(fns, results, strict=True)):
            torch.testing.assert_close(
                found, fn(*inputs), rtol=1e-4, atol=1e-38, equal_nan=True,
                msg=lambda text, i=i: f"function {i}: {text}",
            )  # fmt: skip
    if taken:
        assert [f"{f.op}: {f.reason}" for r in reports for f in r.fallbacks] == []


def test_elementwise():
    fns: list[Any] = [
        torch.exp, torch.exp2, torch.relu, torch.sign, torch.erf, torch.erfc, torch.log1p,
        torch.expm1, torch.trunc, torch.sigmoid, F.mish, F.celu, F.elu, F.silu, F.logsigmoid,
        F.softplus, F.hardtanh, F.hardsigmoid, F.relu6, torch.isnan, Tensor.bool, torch.erfinv,
        lambda x: x.clamp(-1, 2),
        lambda x: x.clamp_min(0.5),
        lambda x: x > 0,
        lambda x: x >= 0.5,
        lambda x: torch.where(x > 0, x, 2 * x),
        lambda x: F.prelu(x, torch.tensor([0.25])),
        lambda x: torch.maximum(x, x.flip(0)) + torch.minimum(x.flip(0), x),
        lambda x: torch.hypot(x, x.flip(0)),
        lambda x: torch.copysign(x, x.flip(0)),
        lambda x: torch.signbit(-x.nan_to_num().abs()),
        lambda x: torch.fmax(x, x.flip(0)) + torch.fmin(x.flip(0), x),
    ]  # fmt: skip
    compared(fns, HARD)


def test_constants_are_not_merged():
    fns = [
        lambda x: (x + 12582912.0) - 12582912.0,
        lambda x: (x - 12345.678) * 3,
        lambda x: x * 1e30 * 1e30,
        lambda x: (x * 1e-30) / 1e-30,
        lambda x: (x / 1e30) * 1e30,
        lambda x: (2.0 - (x + 1e8)) + 1e8,
        lambda x: ((x + 3e7) * 0.5).relu(),
        lambda x: (x * x).sqrt(),
        lambda x: x.clamp(-80).exp().log(),
        lambda x: (x + torch.tensor([1e20])) - torch.tensor([1e20]),
    ]
    compared(fns, HARD, taken=False)


def test_rows():
    fns = [
        lambda x: x.amax(-1),
        lambda x: x.amin(-1),
        lambda x: x.max(-1),
        lambda x: x.min(-1),
        lambda x: x.argmax(-1),
        lambda x: x.argmin(),
        lambda x: x.sort(-1)[0],
        lambda x: x.sort(-1, descending=True)[0],
        lambda x: x.topk(4)[0],
        lambda x: x.topk(4, largest=False)[0],
        lambda x: x[1:].sum(-1),
        lambda x: x.softmax(-1),
        lambda x: x.logsumexp(-1),
    ]
    compared(fns, ROWS)


def test_casts_round():
    numbers = torch.tensor([65504.0, 65519.0, 65520.0, 70000.0, -7e4, 2049.0, 2051.0, 1e-7, 3e-8,
                            1e30, 3.4e38, 0.1, INF, -INF, NAN, 1.0041648])  # fmt: skip
    x = torch.cat([numbers, torch.randn(3000) * torch.randn(3000).mul(8).exp()])
    fns = [lambda x: x.half().float() * 2, lambda x: x.bfloat16().float() * 2]
    compared(fns, x[x.bfloat16().abs() > 1e-30])
    integers = torch.tensor([-(2**31), 2**31 - 1, 70000, -70000, 300, -300, 255, -129]).int()
    types = (torch.int16, torch.int8, torch.uint8)
    compared([lambda x, t=t: x.to(t).int().abs() + 1 for t in types], integers)


def test_rows_of_large_numbers_have_a_deviation():
    compared([lambda x: x.std(-1)], torch.tensor([[1e20, 2e20, 3e20], [1e3, 1e3 + 1, 1e3 + 2]]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_integers_wrap_around(dtype: torch.dtype):
    limits = torch.iinfo(dtype)
    least, most = limits.min, limits.max
    numbers = torch.tensor([least, least + 1, 0, 1, 3, most // 2, most - 1, most]).to(dtype)
    x, y = (t.flatten() for t in torch.meshgrid(numbers, numbers, indexing="ij"))
    fns = [
        lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: -x,
        lambda x, y: x.abs(), lambda x, y: x + 1, lambda x, y: torch.maximum(x, y),
        lambda x, y: x < y, lambda x, y: x <= y, lambda x, y: x > y, lambda x, y: x >= y,
        lambda x, y: x == y, lambda x, y: x != y, lambda x, y: torch.where(x > y, x, y),
    ]  # fmt: skip
    compared(fns, x, y)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_shifts_beyond_the_width(dtype: torch.dtype):
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, 0, 1, 3, limits.max]).to(dtype)
    counts = torch.tensor([1, 7, 9, 17, 33]).to(dtype)
    numbers = (1, 7, 8, 15, 16, 31, 33)
    fns = [lambda x, _, n=n: (x << n, x >> n) for n in numbers]
    compared([*fns, lambda x, n: (x << n, x >> n)], x, counts)


@pytest.mark.parametrize("dynamic", [False, True])
def test_positions_from_the_end(dynamic: bool):
    rows, last = torch.arange(5), torch.tensor([-1, 3, -6, 0, -2])
    x = torch.randn(5, 6, 3)
    compiled = torch.compile(lambda x, a, b: x[a, b], backend="ov", dynamic=dynamic)
    for places in (last, last.flip(0)):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, rows, places), x[rows, places])
            near = places.clamp(-5, 4)
            torch.testing.assert_close(compiled(x, near, places), x[near, places])


def test_reductions_of_integers_in_all_rows():
    """OpenVINO merges a factor into them, and computes the first row."""
    x = torch.arange(12, dtype=torch.uint8).view(2, 2, 3)
    compared([lambda x: -x.sum(1), lambda x: -(x[:, :1].sum(1)), lambda x: x.sum(1) * 3 - 1], x)
    least, most = -(2**31), 2**31 - 1
    large = torch.tensor([[most, most - 1, 3], [least, least + 1, least], [-1, -2, -65537]]).int()
    fns = [lambda x, d=d: (x.amax(d) - 1, x.amin(d, keepdim=True) + 1, x.max()) for d in (0, 1)]
    compared(fns, large)


def test_batch_norm_is_taken():
    norm = torch.nn.BatchNorm2d(3).eval()
    compared([lambda x: norm(x)], torch.randn(2, 3, 4, 4))


_CONTRACTIONS = """
import torch
a, b, m = torch.randn(7), torch.randn(7), torch.randn(5, 7)
calls = [
    (lambda a, b: torch.einsum("i,i->", a, b), a, b), (torch.dot, a, b), (torch.vdot, a, b),
    (torch.matmul, a, b), (torch.mv, m, b), (torch.inner, a, b),
    (lambda x, y: torch.tensordot(x, y, 2), m, m), (lambda x: torch.einsum("ii->", x), m @ m.t()),
    (lambda x, y: torch.einsum("ij,ij->", x, y), m, m), (torch.linalg.vecdot, m, m),
    (lambda x, y: torch.bmm(x.view(1, 1, 7), y.view(1, 7, 1)).relu().view(()), a, b),
]
for fn, *inputs in calls:
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend=BACKEND)(*inputs), fn(*inputs))
print("all")
"""


@pytest.mark.parametrize(
    "backend",
    ["ov", *(pytest.param(name, marks=pytest.mark.long) for name in ("onnxrt", "openxla"))],
)
def test_contractions_to_one_number_do_not_end_the_process(backend: str):
    code = f"BACKEND = {backend!r}\n{_CONTRACTIONS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all", done.stderr[-2000:]


_ATTENTION = """
import torch
import torch.nn.functional as F
import dynamo_backends
from torch import nn

class Block(nn.Module):
    def __init__(self, scores):
        super().__init__()
        self.scores = scores
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.scores(q, k, mask).softmax(-1) @ v
        return x + self.down(F.gelu(self.up(x)))

class Stack(nn.Module):
    def __init__(self, scores):
        super().__init__()
        self.blocks = nn.ModuleList(Block(scores) for _ in range(2))

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x

FORMS = (
    lambda q, k, mask: q @ k.mT,
    lambda q, k, mask: q @ k.mT * 0.25 + mask,
    lambda q, k, mask: torch.bmm(q / 4, k.transpose(1, 2)).masked_fill(mask < 0, -1e9),
    lambda q, k, mask: torch.baddbmm(mask, q, k.mT, alpha=0.25),
)
for scores in FORMS:
    torch._dynamo.reset()
    model, x = Stack(scores).eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        mask = torch.randn(2, 5, 5)
        compiled = torch.compile(model, backend="ov")
        torch.testing.assert_close(compiled(x, mask), model(x, mask))
        heads, mask = x.view(2, 5, 2, 8).transpose(1, 2).reshape(4, 5, 8), mask[:1]
        function = lambda q: x + (torch.bmm(q, q.mT).softmax(-1) @ q).view(2, 5, 16)
        torch.testing.assert_close(torch.compile(function, backend="ov")(heads), function(heads))
print("all")
"""


def test_attention_without_heads_does_not_end_the_process():
    command = [sys.executable, "-c", _ATTENTION]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all", done.stderr[-2000:]
