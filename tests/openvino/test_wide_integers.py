"""64-bit integers are computed by OpenVINO, in pairs of 32-bit ones, as eager does."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dynamo_backends

HARD = torch.tensor(
    [0, 1, -1, 2, -2, 7, -8, 255, 2**24 + 1, 2**31 - 1, -(2**31), 2**31 + 5, 2**53 + 1,
     -(2**53) - 1, 2**63 - 1, -(2**63), -(2**63) + 1, 2**40 - 1, 2**32, -(2**32), 2**62,
     3**39, -(3**39), 1 << 16]
)  # fmt: skip
OTHER = HARD.flip(0).contiguous()
ROWS = HARD.view(4, 6)

FUNCTIONS: dict[str, list[Callable[[Tensor, Tensor], Any]]] = {
    "arithmetic": [
        lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: (x + 5) * 3 - 100,
        lambda x, y: -x, lambda x, y: x.abs(), lambda x, y: x.sign(), lambda x, y: x.relu(),
        lambda x, y: x + torch.arange(24), lambda x, y: x / 3,
    ],
    "division": [
        lambda x, y: x // 3, lambda x, y: x // -2, lambda x, y: x // 255, lambda x, y: x // 1000,
        lambda x, y: torch.div(x, 7, rounding_mode="trunc"), lambda x, y: x % 3,
        lambda x, y: x % -3, lambda x, y: x % 40_000, lambda x, y: torch.fmod(x, -7),
    ],
    "bits": [
        lambda x, y: (x & y) | (x ^ y), lambda x, y: ~x, lambda x, y: x << 3, lambda x, y: x << 33,
        lambda x, y: x << 70, lambda x, y: x >> 3, lambda x, y: x >> 33, lambda x, y: x >> 70,
    ],
    "comparisons": [
        lambda x, y: x < y, lambda x, y: x <= y, lambda x, y: x > y, lambda x, y: x >= 3,
        lambda x, y: x == y, lambda x, y: x != 2**40, lambda x, y: torch.where(x > y, x, y),
        lambda x, y: torch.maximum(x, y), lambda x, y: torch.minimum(x, y),
        lambda x, y: x.clamp(-2, 2**40), lambda x, y: x.bool(),
    ],
    "casts": [
        lambda x, y: x.float(), lambda x, y: x.half(), lambda x, y: x.int(),
        lambda x, y: x.to(torch.uint8), lambda x, y: (x > 3).sum(), lambda x, y: x.int().sum(),
        lambda x, y: x.to(torch.uint8).prod(),
    ],
    "reductions": [
        lambda x, y: x.sum(), lambda x, y: x.view(4, 6).sum(1), lambda x, y: x.cumsum(0),
        lambda x, y: x.view(4, 6).prod(1), lambda x, y: x.prod(), lambda x, y: x.amax(0),
        lambda x, y: x.view(4, 6).amin(1), lambda x, y: x.view(4, 6).max(1),
    ],
    "moves": [
        lambda x, y: x.view(4, 6).t(), lambda x, y: x.flip(0), lambda x, y: x.roll(1, 0),
        lambda x, y: torch.cat([x, torch.arange(3)]), lambda x, y: torch.stack([x, y]),
        lambda x, y: x[[0, -1]], lambda x, y: x.unsqueeze(0).expand(3, 24), lambda x, y: (x, -x),
        lambda x, y: x.view(4, 6).tril(), lambda x, y: torch.nn.functional.pad(x, (1, 2)),
    ],
}  # fmt: skip


def compared(fns: Sequence[Callable[..., Any]], *inputs: Tensor) -> None:
    """Functions, compiled as one, give exactly eager's results, and none of them runs in eager."""
    torch._dynamo.reset()

    def all_of(*values: Tensor) -> list[Any]:
        return [fn(*values) for fn in fns]

    options = {"min_block_size": 1, "verify": "off"}
    with torch.no_grad(), dynamo_backends.record() as reports:
        results = torch.compile(all_of, backend="ov", options=options)(*inputs)
        torch.testing.assert_close(results, all_of(*inputs), rtol=0, atol=0, equal_nan=True)
    assert [f"{f.op}: {f.reason}" for r in reports for f in r.fallbacks] == []


@pytest.mark.parametrize("subject", FUNCTIONS)
def test_results_are_eagers(subject: str):
    compared(FUNCTIONS[subject], HARD, OTHER)


@pytest.mark.parametrize(
    "x",
    [torch.tensor(2**40), ROWS.t(), ROWS[:, 1:5], ROWS[:1].expand(3, 6), torch.full((400, 100), 3)],
    ids=["number", "transposed", "slice", "expanded", "large"],
)
def test_memory_of_any_order(x: Tensor):
    compared([lambda x: x * 2**33 - 1, lambda x: x], x)


def test_positions_beyond_the_size_are_brought_into_it():
    x, at = torch.randn(5, 24), torch.tensor([2**40, -1, 5])
    fns: list[Callable[..., Any]] = [
        lambda x, at: x[..., at % 7 + 1],
        lambda x, at: x.index_select(-1, at % x.shape[-1]),
        lambda x, at: x.gather(-1, at.expand(5, 3) % 24),
    ]
    compared(fns, x, at)


def test_narrower_integers_are_divided():
    fns = [lambda x: x // 3, lambda x: x % 7, lambda x: torch.div(x, -3, rounding_mode="trunc")]
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        compared([*fns, lambda x: torch.fmod(x, 3), lambda x: x // -2], HARD.to(dtype))


def test_one_program_serves_a_range_of_sizes():
    def fn(x: Tensor) -> Tensor:
        return torch.where(x > 2**40, x, x * 3).flip(0)

    torch._dynamo.reset()
    options = {"min_block_size": 1, "fallback": "error"}
    compiled = torch.compile(fn, backend="ov", options=options, dynamic=True)
    for size in (24, 17, 9):
        torch.testing.assert_close(compiled(HARD[:size]), fn(HARD[:size]), rtol=0, atol=0)


def test_casts_to_and_from_float64():
    x = torch.tensor([0.0, -0.0, 1 / 3, float("inf"), -float("inf"), float("nan"), 3e38, 1e-45])
    fns: list[Callable[..., Any]] = [
        lambda x, y: x.double(), lambda x, y: (x + 1).double().float(),
        lambda x, y: (x, x.double()), lambda x, y: y.float(), lambda x, y: x.half().double(),
    ]  # fmt: skip
    compared(fns, x, torch.tensor([1 / 3, 1e300, -1e300, 0.1], dtype=torch.float64))
