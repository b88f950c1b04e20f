"""Programs that serve all smaller sizes, with the worst that padding can hold planted in it."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends.interface.report import GraphReport, record
from dynamo_backends.pipeline.buckets import round_up
from dynamo_backends.xla.lowering.padded import registry
from dynamo_backends.xla.lowering.padded.call import PaddedCall, elementwise
from dynamo_backends.xla.lowering.padded.extents import Factor, extents_of, reshaped
from dynamo_backends.xla.padded import executable

aten = torch.ops.aten

BAD = {"nan": math.nan, "inf": math.inf}


@pytest.fixture(autouse=True)
def many_recompilations() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


@pytest.fixture(autouse=True, params=BAD)
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def new_padding(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = torch.empty(shape, dtype=dtype, device=device)
        if dtype.is_floating_point or dtype.is_complex:
            return memory.fill_(BAD[request.param])
        return memory.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)

    monkeypatch.setattr(executable, "new_padding", new_padding)


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    settings = {"cache": False, "verify": "off", "fallback": "error", "min_block_size": 1}
    return torch.compile(fn, backend="openxla", options={**settings, **options})


def varying(x: Tensor) -> Tensor:
    for dim in range(x.ndim):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def agree(result: Any, expected: Any, **tolerances: float) -> None:
    torch.testing.assert_close(result, expected, equal_nan=True, **tolerances)
    leaves = torch.utils._pytree.tree_leaves
    for r, e in zip(leaves(result), leaves(expected), strict=True):
        if isinstance(e, Tensor):
            assert r.stride() == e.stride()


W = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda x: (x.exp() * 2 + x).relu(),
    "sums": lambda x: (x.sum(0), x.sum(1), x.sum(), x.sum((0, 1), keepdim=True)),
    "means": lambda x: (x.mean(0), x.mean(1, keepdim=True), x.mean()),
    "product": lambda x: x.prod(1),
    "extrema": lambda x: (x.amax(0), x.amin(1), x.max(), x.min(), x.int().amax(1)),
    "any": lambda x: ((x > 0).any(0), (x > 9).any(), (x < 9).all(1), (x < 9).all()),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(1)),
    "contracted": lambda x: x.t() @ x,
    "batch of products": lambda x: x[:, None, :] @ x[:, :, None],
    "rows": lambda x: F.linear(x[:, :, None] * W[0], W, W[:, 0]),
    "bias": lambda x: torch.addmm(x.sum(1)[:, None], x, x.t()),
    "layer norm": lambda x: F.layer_norm(x[:, :, None] * W[:, 0], (6,), W[:, 1], W[:, 2]),
    "rms norm": lambda x: F.rms_norm(x[:, :, None] * W[:, 0], (6,), W[:, 1]),
    "embedding": lambda x: F.embedding(x.abs().long() % 9, TABLE),
    "merged": lambda x: (x[:, :, None] * W[0]).reshape(-1, 5).exp().mean(0),
    "merged and split": lambda x: ((x[:, :, None] * W[0]).view(-1, 5) @ W.t()).view(*x.shape, 6),
    "merged result": lambda x: (x * 2).reshape(-1),
    "merged mean": lambda x: x.reshape(-1).softmax(0).sum() + x.reshape(-1).mean(),
    "spread": lambda x: x.sum(0, keepdim=True).expand(x.shape[0], -1) * 2,
    "positions": lambda x: x + torch.arange(x.shape[1]) / 2,
    "causal": lambda x: torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1]),
    "filled": lambda x: x + x.new_ones(x.shape[0], 1) + torch.zeros(x.shape[1]),
    "divided": lambda x: x.sum(0) / x.shape[0],
    "last": lambda x: (x[:, -1], x[-1], x[0], x[:, 1]),
    "cut": lambda x: (x[:, 1:] + 1, x[:-1] * 2, x[::2] - 1),
    "read": lambda x: (x[:, torch.tensor([0, -1])], x[torch.tensor([1, -2])]),
    "transposed": lambda x: (x.t() + 1, x.t().contiguous() * 2),
    "joined": lambda x: torch.cat([x[:, :, None], x[:, :, None] * W[0]], 2).sum((0, 1)),
    "stacked": lambda x: torch.stack([x, x * 2], 1).mean(0),
    "parts": lambda x: [p * 2 for p in (x[:, :, None] * W[0]).split(2, -1)],
}

SIZES = ((6, 7), (3, 8), (8, 5), (8, 8), (2, 3))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program_serves_smaller_sizes(name: str):
    with record() as reports:
        run = compiled(FUNCTIONS[name], exact_after=100, bucket_growth=8.0)
        for size in SIZES:
            x = varying(torch.randn(size))
            agree(run(x), FUNCTIONS[name](x))
    assert {r.exact for r in reports} == {""}
    assert all(r.executables <= 2 for r in reports)
