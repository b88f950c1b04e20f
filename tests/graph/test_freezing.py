"""Frozen weights are never stale: every way of changing one is seen at the next call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.graph.freezing import Snapshot, pointers


def net() -> nn.Module:
    """A net whose weights XLA transforms (the convolution) and reads as they are (the product)."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 5)
    ).eval()


def optimizer(**settings: Any) -> Callable[[nn.Module], None]:
    def step(module: nn.Module) -> None:
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        torch.optim.AdamW(module.parameters(), lr=0.1, **settings).step()

    return step


def each(change: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    def apply(module: nn.Module) -> None:
        with torch.no_grad():
            for p in module.parameters():
                change(p)

    return apply


def numpy_write(p: Tensor) -> None:
    p.detach().numpy()[...] *= 1.5


def new_data(p: Tensor) -> None:
    p.data = p.data * 1.5


def new_parameter(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach() * 2)
    module[3].bias = nn.Parameter(module[3].bias.detach() + 1)


def load(assign: bool) -> Callable[[nn.Module], None]:
    def apply(module: nn.Module) -> None:
        module.load_state_dict(net().state_dict(), assign=assign)

    return apply


def buffer_update(module: nn.Module) -> None:
    module[1].running_mean.add_(1)
    module[1].running_var.mul_(2)


def other_dtype_and_back(module: nn.Module) -> None:
    module.double()
    for p in module.parameters():
        p.data.mul_(1.5)
    module.float()


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "optimizer": optimizer(foreach=False, fused=False),
    "optimizer foreach": optimizer(foreach=True),
    "optimizer fused": optimizer(fused=True),
    "load_state_dict": load(assign=False),
    "load_state_dict assign": load(assign=True),
    "copy_": each(lambda p: p.copy_(torch.randn_like(p))),
    "data.add_": each(lambda p: p.data.add_(0.5)),
    "data.normal_": each(lambda p: p.data.normal_()),
    "numpy": each(numpy_write),
    "data =": each(new_data),
    "new Parameter": new_parameter,
    "buffer": buffer_update,
    "dtype": other_dtype_and_back,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["probe", "strict", "off"])
def test_a_changed_weight_is_seen_at_the_next_call(way: str, policy: str):
    module = net()
    compiler = dynamo_backends.compiler("openxla", freezing=policy)
    compiled = torch.compile(module, backend=compiler)
    x = torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        compiled(x)
        before = module(x)
    WAYS[way](module)
    with torch.no_grad():
        expected = module(x)
        assert not torch.allclose(before, expected), "the change must matter"
        torch.testing.assert_close(compiled(x), expected)


def test_a_single_element_is_seen_by_the_strict_policy():
    module = net()
    compiler = dynamo_backends.compiler("openxla", freezing="strict")
    compiled = torch.compile(module, backend=compiler)
    x = torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        compiled(x)
        module[0].weight.detach().numpy()[1, 2, 0, 1] += 7
        torch.testing.assert_close(compiled(x), module(x))


def test_unchanged_weights_are_prepared_once():
    module, x = net(), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(module, backend=dynamo_backends.compiler("openxla"))
    with torch.no_grad(), dynamo_backends.record() as reports:
        for _ in range(5):
            compiled(x)
    assert [r.rebinds for r in reports] == [0]


def test_weights_that_keep_changing_are_no_longer_checked_but_always_right():
    module, x = net(), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(module, backend=dynamo_backends.compiler("openxla"))
    with torch.no_grad():
        for _ in range(8):
            module[0].weight.mul_(0.9)
            torch.testing.assert_close(compiled(x), module(x))


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
    snapshot = Snapshot([a, b], copied=[1], policy="probe")
    a.data.add_(1)
    assert snapshot.is_current([a, b])
    b.data.add_(1)
    assert not snapshot.is_current([a, b])
    assert pointers([a, b]) == snapshot.pointers


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
    snapshot = Snapshot([weight], [0], policy)
    assert snapshot.is_current([weight])
    if weight.numel():
        weight.data.copy_(torch.ones_like(weight) * 3 if weight.dtype != torch.bool else ~weight)
        assert not snapshot.is_current([weight])


def test_inference_tensors_have_no_version_and_are_watched_by_contents():
    with torch.inference_mode():
        weight = torch.randn(5)
        snapshot = Snapshot([weight], [0], "probe")
        assert snapshot.is_current([weight])
        weight.mul_(2)
        assert not snapshot.is_current([weight])
