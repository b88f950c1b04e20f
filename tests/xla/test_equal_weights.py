"""Weights that several programs prepare alike exist once."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends._torch_private import from_dlpack
from dynamo_backends.xla import _jaxlib, runtime
from dynamo_backends.xla.runtime import open_device
from dynamo_backends.xla.torch_prologue import LEAST, PreparedWeightCache, equal_weights

MANY = LEAST // 4  # elements of float32


def buffers(
    known: PreparedWeightCache, prepared: list[Tensor], weights: tuple[Tensor, ...] = ()
) -> Any:
    device = open_device("cpu")
    return known.buffers(prepared, weights, device.handle, device.import_tensor)


def contents(buffer: Any) -> Tensor:
    return from_dlpack(_jaxlib.export_dlpack(buffer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
def test_equal_ones_are_one(dtype: torch.dtype):
    known, made = PreparedWeightCache(), (torch.randn(4, LEAST) * 3).to(dtype)
    one, other = (buffers(known, [made.clone()])[0] for _ in range(2))
    assert one is other
    assert torch.equal(contents(one), made)


def test_bits_are_compared():
    known, zeros = PreparedWeightCache(), torch.zeros(MANY)
    nans = torch.full((MANY,), torch.nan)
    off = zeros.clone()
    off[MANY - 2] = 1
    prepared = [zeros, -zeros, nans, off, zeros[:-1].clone(), zeros.view(2, -1).clone()]
    made = [buffers(known, [tensor])[0] for tensor in prepared]
    assert len({id(buffer) for buffer in made}) == len(prepared)
    assert buffers(known, [nans.clone()])[0] is made[2]
    for buffer, tensor in zip(made, prepared, strict=True):
        torch.testing.assert_close(contents(buffer), tensor, rtol=0, atol=0, equal_nan=True)


def test_what_the_caller_may_write_to_is_nobody_elses():
    known, weight = PreparedWeightCache(), torch.randn(MANY)
    (apart,) = buffers(known, [weight.clone()])
    (own,) = buffers(known, [weight.view(2, -1)], (weight,))
    (later,) = buffers(known, [weight.view(2, -1).clone()])
    assert own is not apart
    assert later is not own
    weight.zero_()
    assert contents(apart).any()
    assert contents(later).any()


def test_they_go_with_the_programs():
    known = PreparedWeightCache()
    held = buffers(known, [torch.randn(MANY)])
    assert len(known._known) == 1
    del held
    gc.collect()
    assert len(known._known) == 0


@torch.no_grad()
def test_programs_of_many_sizes_share_them(monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    transform = runtime.XlaExecutable._transform

    def noting(self: Any, weights: Any) -> Any:
        found = transform(self, weights)
        made.append(found)
        return found

    monkeypatch.setattr(runtime.XlaExecutable, "_transform", noting)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32)).eval()
    run = torch.compile(
        model,
        backend="openxla",
        dynamic=True,
        options={"cache": False, "bucket_growth": 1, "min_block_size": 1},
    )

    def check() -> None:
        for size in (3, 4, 5):
            x = torch.randn(size, 16, 8, 8)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)

    with dynamo_backends.record() as reports:
        check()
    assert reports[0].executables == 3
    large = [[x for x in found if contents(x).nbytes >= LEAST] for found in made]
    assert all(large)
    assert len({id(x) for found in large for x in found}) == len(large[0])
    made.clear()
    model[0].weight.mul_(2)
    check()
    changed = [[x for x in found if contents(x).nbytes >= LEAST] for found in made]
    assert len({id(x) for found in changed for x in found}) == len(changed[0])
    assert {id(x) for x in changed[0]}.isdisjoint(id(x) for x in large[0])


def test_the_one_of_this_process_holds_nothing():
    gc.collect()  # weights that other tests left
    before = len(equal_weights._known)
    held = buffers(equal_weights, [torch.randn(MANY)])
    assert len(equal_weights._known) == before + 1
    del held
    gc.collect()
    assert len(equal_weights._known) == before
