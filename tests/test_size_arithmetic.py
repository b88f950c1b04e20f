"""Calls of changing sizes, of which nothing is compared with eager but by these tests.

What a lowering makes of a call may be right for the sizes that it was made at alone: positions up
to a size, steps of a scan, digits of a sum. And Python's arithmetic with sizes comes as calls on
tensors without dimensions.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.conformance.traffic import agree
from tests.backend_checks import usable

NAMES = ["onnxrt", "ov", "openxla", "iree", "tvm", "ts_trace", "ofi", "static_runtime"]
SIZES = ((3, 8), (5, 12), (4, 6), (9, 4), (7, 300))

ARITHMETIC: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x + (x.shape[0] + x.shape[1]),
    "difference": lambda x: x - (x.shape[0] - x.shape[1]),
    "product": lambda x: x * (x.shape[0] * x.shape[1]),
    "negative": lambda x: x * -x.shape[0],
    "quotient": lambda x: x * (x.shape[0] / x.shape[1]),
    "inverse": lambda x: x * (1.0 / x.shape[0]),
    "floor division": lambda x: x * ((x.shape[0] * 7) // x.shape[1]),
    "inverse of floor division": lambda x: x * (1.0 / (x.shape[0] // 4 + 1)),
    "modulo": lambda x: x + (x.shape[0] * 5) % x.shape[1],
    "power": lambda x: x + x.shape[0] ** 2,
    "root": lambda x: x * x.shape[0] ** 0.5,
    "inverse root": lambda x: x * x.shape[1] ** -0.5,
    "square root": lambda x: x / math.sqrt(x.shape[1]),
    "float": lambda x: x * float(x.shape[0]),
    "comparison": lambda x: x > x.shape[0],
    "comparison with a float": lambda x: x < x.shape[1] / 3,
    "where": lambda x: torch.where(x > 0, x, x.shape[0]),
    "positions": lambda x: x + torch.arange(x.shape[1]) / x.shape[1],
    "integers": lambda x: x.int() * (x.shape[0] % 3) + x.shape[1] // 2,
    "half precision": lambda x: x.half() + x.shape[0],
}
"""Served by one program on ONNX Runtime and OpenVINO."""

ROUNDED: dict[str, Callable[[Tensor], Any]] = {
    "floor": lambda x: x * math.floor(x.shape[0] / 2),
    "ceil": lambda x: x * math.ceil(x.shape[1] / 3),
    "trunc": lambda x: x * math.trunc(x.shape[1] / 3),
    "round": lambda x: x * round(x.shape[1] / 3),
    "int": lambda x: x * int(x.shape[0] * 0.5),
    "min": lambda x: x * min(x.shape[0], x.shape[1]),
    "max": lambda x: x * max(x.shape[0], 4),
    "sine": lambda x: x * math.sin(x.shape[0]),
    "clamp": lambda x: (x * 4).clamp(-x.shape[1] / 8, x.shape[0]),
    "masked": lambda x: x.masked_fill(x > 0, x.shape[0]),
    "full": lambda x: x + torch.full((x.shape[1],), x.shape[0] / 4),
    "remainder": lambda x: (x * 10) % x.shape[0],
    "interpolation": lambda x: torch.lerp(x, x + 1, x.shape[0] / x.shape[1]),
    "returned bool": lambda x: (x + 1, x.shape[0] > x.shape[1]),
    "returned minimum": lambda x: (x + 1, min(x.shape[0], x.shape[1])),
    "returned root": lambda x: (x + 1, math.sqrt(x.shape[0])),
}

OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "maximum": lambda x: x.max(1),
    "minimum": lambda x: x.min(0),
    "position": lambda x: x.argmax(0, keepdim=True),
    "position of all": lambda x: x.argmin(),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(2, 1),
    "cumsum": lambda x: x.cumsum(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "norm": lambda x: (x.norm(dim=1), x.norm()),
    "std": lambda x: x.std(0),
    "indices": lambda x: x[torch.tensor([0, -1]), torch.tensor([1, 0])],
    "scatter": lambda x: x.scatter_add(1, x.abs().long() % 2, x),
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 1]), x[:, :2]),
    "split": lambda x: x.split(2, 1)[0],
    "reflection": lambda x: F.pad(x[None], (1, 1), mode="reflect"),
    "replication": lambda x: F.pad(x[None], (1, 1), mode="replicate"),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2, mode="linear"),
    "glu": lambda x: F.glu(x, 1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "cross entropy": lambda x: F.cross_entropy(x, x.abs().long().sum(1) % 2),
    "sum of large integers": lambda x: (x * 1e6).long().mul(10**6).sum(1),
    "scan of large integers": lambda x: (x * 1e6).long().mul(10**6).cumsum(1),
    "largest integer": lambda x: (x * 4).long().max(1),
    "slice of integers": lambda x: (x * 4).long()[1:, :-1] + 2,
    "half of integers": lambda x: x.long()[: x.shape[0] // 2 + 1] + x.shape[1] % 3,
    "integers in another order": lambda x: (x * 4).long().t() + 1,
    "padded integers": lambda x: F.pad((x * 4).long(), (1, 2)),
}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return usable(request.param)


@pytest.fixture(autouse=True)
def many_recompilations() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def run_all_sizes(name: str, fn: Callable[[Tensor], Any]) -> list[GraphReport]:
    compiler = dynamo_backends.compiler(name, cache=False, min_block_size=1, verify="off")
    run = torch.compile(fn, backend=compiler, dynamic=True)
    with dynamo_backends.record() as reports, torch.no_grad():
        for size in SIZES:
            x = torch.randn(size)
            agree(run(x), fn(x))
    assert [f for r in reports for f in r.runtime_fallbacks] == []
    return reports


@pytest.mark.parametrize("function", ARITHMETIC)
def test_arithmetic_is_computed_by_the_backend(name: str, function: str):
    reports = run_all_sizes(name, ARITHMETIC[function])
    if name in ("onnxrt", "ov"):
        assert [f.op for r in reports for f in r.fallbacks] == []
        assert sum(r.executables for r in reports) == 1


@pytest.mark.parametrize("function", ROUNDED)
def test_other_numbers(name: str, function: str):
    run_all_sizes(name, ROUNDED[function])


@pytest.mark.parametrize("function", OPERATORS)
def test_operators(name: str, function: str):
    run_all_sizes(name, OPERATORS[function])
