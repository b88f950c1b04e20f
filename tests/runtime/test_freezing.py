"""Snapshots of frozen weights (tests/test_freezing.py has the ways of changing one)."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.runtime.weight_binding import WeightSnapshot, _samples, value_bits


def net() -> nn.Module:
    """A net whose weights XLA transforms (the convolution) and reads as they are (the product)."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 5)
    ).eval()


def test_two_instances_share_one_compilation_and_keep_their_weights():
    first, second = net(), net()

    def apply(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    compiled = torch.compile(apply, backend=dynamo_backends.compiler("openxla"))
    x = torch.randn(2, 4, 4, 4)
    with torch.no_grad(), dynamo_backends.record() as reports:
        for _ in range(3):
            for module in (first, second):
                torch.testing.assert_close(compiled(module, x), module(x))
    assert sum(r.rebinds for r in reports) == 0


def test_a_deleted_models_weights_are_released():
    import gc
    import weakref

    module = net()
    compiled = torch.compile(module, backend=dynamo_backends.compiler("openxla"))
    with torch.no_grad():
        compiled(torch.randn(2, 4, 4, 4))
    alive = weakref.ref(module[0].weight)
    del module, compiled
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_only_copied_weights_are_watched_for_their_contents():
    a, b = torch.randn(10), torch.randn(10)
    snapshot = WeightSnapshot([a, b], copied=[1], policy="probe")
    a.data.add_(1)
    assert snapshot.is_current([a, b])
    b.data.add_(1)
    assert not snapshot.is_current([a, b])


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(4, 6).t(), torch.randn(3, 4, 5).permute(2, 0, 1), torch.tensor(2.0),
        torch.zeros(0), torch.randn(4, dtype=torch.complex64), torch.tensor([True, False]),
        torch.full((5,), float("nan")), torch.randn(6, dtype=torch.bfloat16),
    ],
    ids=["transposed", "permuted", "0-d", "empty", "complex", "bool", "nan", "bfloat16"],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["probe", "strict"])
def test_snapshots_of_unusual_weights(weight: Tensor, policy: Any):
    weight = weight.clone(memory_format=torch.preserve_format)
    snapshot = WeightSnapshot([weight], [0], policy)
    assert snapshot.is_current([weight])
    if weight.numel():
        weight.data.copy_(torch.ones_like(weight) * 3 if weight.dtype != torch.bool else ~weight)
        assert not snapshot.is_current([weight])


@pytest.mark.parametrize("policy", ["probe", "strict"])
def test_writes_to_the_memory_of_lazy_weights_are_seen(policy: Any):
    memory = torch.randn(100, dtype=torch.complex64)
    for weight in (memory.conj(), memory.conj().imag, memory.conj()._neg_view()):
        snapshot = WeightSnapshot([weight], [0], policy)
        assert snapshot.is_current([weight])
        memory.data.add_(1 + 1j)
        assert not snapshot.is_current([weight])


def test_bits_are_those_of_the_values():
    number = torch.complex(torch.ones(3), torch.ones(3))
    assert torch.equal(value_bits(number.conj().imag), value_bits(-torch.ones(3)))
    assert torch.equal(
        value_bits(number.conj()), value_bits(torch.complex(torch.ones(3), -torch.ones(3)))
    )


def test_inference_tensors_have_no_version_and_are_watched_by_contents():
    with torch.inference_mode():
        weight = torch.randn(5)
        snapshot = WeightSnapshot([weight], [0], "probe")
        assert snapshot.is_current([weight])
        weight.mul_(2)
        assert not snapshot.is_current([weight])


def test_scaling_a_pruned_weight_is_seen():
    weight = torch.zeros(100, 100)
    weight[60:75] = 1
    snapshot = WeightSnapshot([weight], [0], "probe")
    weight.data.mul_(2)
    assert not snapshot.is_current([weight])


def test_the_probe_cannot_see_one_element_through_an_alias_and_strict_can():
    weight = torch.randn(1000, 1000)
    probe, strict = WeightSnapshot([weight], [0], "probe"), WeightSnapshot([weight], [0], "strict")
    weight.detach().numpy()[777, 333] += 1
    assert probe.is_current([weight])
    assert not strict.is_current([weight])


def test_an_optimizers_step_concerns_the_weights_that_share_its_storages():
    base, other = torch.randn(10), torch.randn(10)
    weight = base[2:5]
    snapshots = [WeightSnapshot([weight], [0], "strict"), WeightSnapshot([other], [0], "strict")]
    parameter = nn.Parameter(base)
    parameter.grad = torch.zeros(10)
    torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    assert [s.is_current([w]) for s, w in zip(snapshots, (weight, other), strict=True)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 33, 64])
def test_each_element_of_small_weights_is_watched_wherever_they_lie(
    dtype: torch.dtype, offset: int, count: int
):
    memory = torch.ones(offset + count, dtype=dtype)
    others = [torch.ones(5, dtype=dtype), torch.ones(0, dtype=dtype)]
    weights = [others[0], memory[offset:], others[1]]
    snapshot = WeightSnapshot(weights, range(3), "probe")
    bits = memory.view(torch.uint8).numpy()
    for place in range(offset * dtype.itemsize, len(bits)):
        assert snapshot.is_current(weights)
        bits[place] ^= 1
        assert not snapshot.is_current(weights)
        bits[place] ^= 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("offset", range(3))
def test_runs_of_large_weights_are_whole_lines_where_they_can_be(dtype: torch.dtype, offset: int):
    weight = torch.ones(1000 + offset, dtype=dtype)[offset:]
    runs = _samples(weight)
    assert len(runs) == 4
    starts = [run.data_ptr() for run in runs]
    assert all(n % 64 == 0 or n == weight.data_ptr() for n in starts)
    assert all(run.numel() == 16 for run in runs)
    end = weight.data_ptr() + weight.nbytes
    assert all(
        weight.data_ptr() <= n <= end - run.nbytes for n, run in zip(starts, runs, strict=True)
    )
    snapshot = WeightSnapshot([weight], [0], "probe")
    weight.numpy()[:] += 1
    assert not snapshot.is_current([weight])
