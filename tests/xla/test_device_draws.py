"""Random numbers that a device draws: which, from what distributions, and what goes up for them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynamo_backends import compile_step
from dynamo_backends.graph.counter_based_rng import SEEDED_DRAW, supports_distribution, threefry2x32
from dynamo_backends.graph.seeded_draws import replace_draws_by_seeded
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.pipeline import compiled_graph
from dynamo_backends.runtime.device_tensor import DeviceTensor
from dynamo_backends.xla import to_device
from dynamo_backends.xla.lowering import random as on_device
from tests.aot.step_checks import assert_one_program
from tests.doubles.remote import RemoteDouble

OPTIONS = {"fallback": "error"}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function compiled by openxla, all of it."""
    return torch.compile(function, backend="openxla", options={**OPTIONS, **options})


def seeded(seed: int, function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns after torch's generator was seeded."""
    torch.manual_seed(seed)
    return function(*args)


# Key, counter, result: from the file kat_vectors of Random123, the authors' library.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_words_are_those_of_the_published_generator(key: Any, counter: Any, expected: Any):
    words = threefry2x32(tuple(map(torch.tensor, key)), tuple(map(torch.tensor, counter)))
    assert tuple(map(int, words)) == expected
    words = on_device.threefry(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
    assert tuple(map(int, words)) == expected


def _normal_below(x: Tensor) -> Tensor:
    return torch.special.ndtr((x - 1) / 2)


# Method, arguments, what part of all numbers is below one (of integers and bools: below or equal).
DISTRIBUTIONS: dict[str, tuple[list[float], Callable[[Tensor], Tensor]]] = {
    "uniform_": ([-1.0, 3.0], lambda x: (x + 1) / 4),
    "normal_": ([1.0, 2.0], _normal_below),
    "exponential_": ([2.0], lambda x: -torch.expm1(-2 * x)),
    "random_": ([-3.0, 5.0], lambda x: (x + 4) / 8),
    "bernoulli_": ([0.3], lambda x: torch.where(x < 1, 0.7, 1.0)),
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("method", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_have_their_distribution(method: str, dtype: torch.dtype):
    arguments, below = DISTRIBUTIONS[method]
    count = 40_000
    numbers = SEEDED_DRAW(torch.tensor([1]), 0, method, [count], [1], dtype, arguments)
    values, counts = torch.unique(numbers.double(), return_counts=True)
    found = counts.cumsum(0) / count
    # Kolmogorov and Smirnov: larger by chance once in 3000 generators; this one is always the same.
    assert (found - below(values)).abs().max() < 2.1 / math.sqrt(count)
    halves = numbers.double().view(2, -1)
    assert torch.corrcoef(halves)[0, 1].abs() < 4 / math.sqrt(count / 2)
    neighbours = torch.stack([numbers[:-1], numbers[1:]]).double()
    assert torch.corrcoef(neighbours)[0, 1].abs() < 4 / math.sqrt(count)
    other = SEEDED_DRAW(torch.tensor([2]), 0, method, [count], [1], dtype, arguments)
    assert torch.corrcoef(torch.stack([numbers, other]).double())[0, 1].abs() < 4 / math.sqrt(count)


@pytest.mark.parametrize("method", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_host_and_a_device_draw_the_same(method: str, dtype: torch.dtype):
    arguments, _ = DISTRIBUTIONS[method]
    seeds = torch.tensor([3, 2**62 + 12345])
    strides = [1, 60, 12]
    expected = SEEDED_DRAW(seeds, 1, method, [12, 7, 5], strides, dtype, arguments)
    assert list(expected.stride()) == strides
    with jax.enable_x64(True):
        given = jnp.array(seeds.numpy())
        found = on_device.seeded_draw(given, 1, method, [12, 7, 5], None, dtype, arguments)
        same = torch.from_numpy(np.array(found.astype(jnp.float64)))
    ulps = 0 if method in ("random_", "bernoulli_", "uniform_") else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(same, expected.double(), rtol=ulps, atol=ulps)


def test_edges_of_distributions():
    seeds = torch.tensor([11])
    for p, mean in ((0.0, 0.0), (1.0, 1.0)):
        mask = SEEDED_DRAW(seeds, 0, "bernoulli_", [1000], [1], torch.bool, [p])
        assert mask.float().mean() == mean
        with jax.enable_x64(True):
            given = jnp.array(seeds.numpy())
            found = on_device.seeded_draw(given, 0, "bernoulli_", [9], None, torch.bool, [p])
        assert np.asarray(found).mean() == mean
    for dtype in FLOATS:
        numbers = SEEDED_DRAW(seeds, 0, "uniform_", [100_000], [1], dtype, [0.0, 1.0])
        assert numbers.min() >= 0
        assert numbers.max() < 1
    waits = SEEDED_DRAW(seeds, 0, "exponential_", [100_000], [1], torch.float32, [1.0])
    assert waits.min() > 0
    assert waits.isfinite().all()
    assert not supports_distribution("random_", torch.int64, ())
    assert not supports_distribution("bernoulli_", torch.float32, (1.5,))
    assert not supports_distribution("geometric_", torch.float32, (0.5,))


def _model() -> nn.Module:
    layers = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.5)
    return nn.Sequential(*layers, nn.Linear(16, 4))


def test_no_mask_goes_up(device: RemoteDouble):
    model = to_device(_model(), "remote")
    run = compiled(model)
    x, gradient = (to_device(torch.ones(6, n), "remote") for n in (8, 4))
    run(x).backward(gradient)
    results = []
    for seed in (1, 1, 2):
        model.zero_grad()
        with device.traffic.counted() as traffic:
            result = seeded(seed, run, x)
            result.backward(gradient)
        assert traffic.uploads == [(2,)]  # the seeds of two layers
        assert not traffic.downloads
        results.append((result.tolist(), model[0].weight.grad.tolist()))
    assert results[0] == results[1]
    assert results[0][0] != results[2][0]
    with device.traffic.counted() as traffic:
        eager = seeded(1, model, x)
    assert {shape for shape in traffic.uploads if shape} == {(1,)}
    torch.testing.assert_close(torch.tensor(results[0][0]), eager.host().detach())


def test_a_gradient_knows_what_was_dropped(device: RemoteDouble):
    run = compiled(lambda x: F.dropout(x, 0.25))
    for _ in range(3):
        x = to_device(torch.ones(40, 50), "remote").requires_grad_()
        result = run(x)
        result.backward(to_device(torch.ones(40, 50), "remote"))
        assert torch.equal(x.grad.host(), result.host().detach())
        kept = (result.host() != 0).float().mean().item()
        assert kept == pytest.approx(0.75, abs=0.05)
        torch.testing.assert_close(result.host().max().item(), 1 / 0.75, rtol=1e-6, atol=0)


def test_steps_draw_on_the_device(device: RemoteDouble):
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        model = to_device(_model(), "remote")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = compile_step(train, model=model, optimizer=optimizer)
        given = torch.randn(6, 8)
        for _ in range(2):  # the first one runs in eager
            step(given)
        with device.traffic.counted() as traffic:
            made = [step(given) for _ in range(4)]
        assert_one_program(step, 6)
        assert traffic.uploads == [(6, 8), (2,)] * 4
        assert not traffic.downloads
        losses.append([loss.item() for loss in made])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


def _checkpointed(x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        product = x @ x.T
        return F.dropout(F.dropout(product, 0.4).sin(), 0.2) * torch.rand_like(product)

    return checkpoint(inner, x, use_reentrant=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_checkpoints_draw_the_same_again(device: RemoteDouble, dynamic: bool):
    run = torch.compile(_checkpointed, backend="openxla", options=OPTIONS, dynamic=dynamic)
    for size in (5, 6):
        found = []
        for function in (run, run, _checkpointed):
            x = to_device(torch.ones(size, 4), "remote").requires_grad_()
            result = seeded(9, function, x)
            result.backward(to_device(torch.ones(size, size), "remote"))
            found.append((result.host().detach(), x.grad.host()))
        for mine in found[:2]:
            torch.testing.assert_close(mine, found[2])


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_checkpoints_draw_the_same_when_one_half_runs_in_eager(
    device: RemoteDouble, monkeypatch: pytest.MonkeyPatch, kind: str
):
    failed = []

    def seed(graph: Any) -> bool:
        if graph.kind == kind:
            failed.append(graph)
            raise CompileError("out of coffee")
        return replace_draws_by_seeded(graph)

    monkeypatch.delenv("DYNAMO_BACKENDS_CHECK")  # under which failures are raised
    monkeypatch.setattr(compiled_graph, "replace_draws_by_seeded", seed)
    run = torch.compile(_checkpointed, backend="openxla")
    found = []
    for function in (run, _checkpointed):
        x = to_device(torch.ones(5, 4), "remote").requires_grad_()
        result = seeded(9, function, x)
        result.backward(to_device(torch.ones(5, 5), "remote"))
        found.append((result.host().detach(), x.grad.host()))
    assert failed
    torch.testing.assert_close(found[0], found[1])


def test_masks_of_checkpoints_stay_on_the_device(device: RemoteDouble):
    run = compiled(_checkpointed)
    for _ in range(2):
        x = to_device(torch.ones(5, 4), "remote").requires_grad_()
        gradient = to_device(torch.ones(5, 5), "remote")
        with device.traffic.counted() as traffic:
            run(x).backward(gradient)
    assert set(traffic.uploads) == {(1,)}


def test_sizes_that_vary_draw_what_others_draw(device: RemoteDouble):
    run = torch.compile(
        lambda x: F.dropout(x * 2, 0.5),
        backend="openxla",
        options={"device": "remote"},
        dynamic=True,
    )
    for size in (5, 7, 11):
        x = torch.ones(size, 4)
        expected = seeded(4, F.dropout, to_device(x * 2, "remote"), 0.5)
        assert seeded(4, run, x).tolist() == expected.tolist()


def test_calls_in_eager(device: RemoteDouble):
    x = to_device(torch.zeros(64, 48), "remote")
    with device.traffic.counted() as traffic:
        x.normal_(1, 2)
        x.T[1:3].uniform_(5, 6)
        whole = torch.randint_like(x, 3, 9)
        wide = torch.rand_like(x, dtype=torch.float64)
        waits = torch.empty_like(x).exponential_()
        mask = torch.empty_like(x).bernoulli_(0.25)
        small = torch.empty_like(x).random_(4)
    assert {shape for shape in traffic.uploads if shape} == {(1,)}
    assert not traffic.downloads
    given = (x, whole, wide, waits, mask, small)
    assert all(isinstance(t, DeviceTensor) for t in given)
    assert ((x.host().T[1:3] >= 5) & (x.host().T[1:3] < 6)).all()
    assert x.host()[:, 3:].mean().item() == pytest.approx(1, abs=0.2)
    assert set(whole.host().unique().tolist()) == {3, 4, 5, 6, 7, 8}
    assert wide.dtype is torch.float64
    assert waits.host().mean().item() == pytest.approx(1, abs=0.1)
    assert mask.host().mean().item() == pytest.approx(0.25, abs=0.05)
    assert set(small.host().unique().tolist()) == {0, 1, 2, 3}


def test_what_a_device_cannot_draw_is_torchs(device: RemoteDouble):
    weights = torch.tensor([0.1, 0.2, 0.7])
    expected = seeded(6, torch.multinomial, weights, 2)
    assert torch.equal(seeded(6, torch.multinomial, to_device(weights, "remote"), 2), expected)
    generator = torch.Generator().manual_seed(8)
    plain = torch.zeros(5).normal_(generator=torch.Generator().manual_seed(8))
    resident = to_device(torch.zeros(5), "remote").normal_(generator=generator)
    assert resident.tolist() == plain.tolist()
