"""Frozen weights are never stale: every way of changing one, by every backend that freezes.

Each way is tried alone on the backend made for it and on openxla; of the others each has every
fourth, another one each, and all of them in turn.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import dynamo_backends
from dynamo_backends import Availability, Backend, Executable, Options, Support
from dynamo_backends.graph.graph import Graph
from dynamo_backends.pipeline.captured import compile_captured
from tests.checking import assert_same
from tests.rotation import long_if


class Copying(Backend):
    """Copies all weights when it binds them: whatever is not noticed gives a stale result."""

    name = "copying"

    def availability(self) -> Availability:
        return Availability(True, "always")

    def supports(self, node: fx.Node, options: Options) -> Support:
        return Support(True)

    def compile(self, graph: Graph, options: Options) -> Executable:
        return Copied(graph)


class Copied(Executable):
    def __init__(self, graph: Graph):
        self._graph = graph

    def bind(self, weights: Sequence[Tensor]) -> Any:
        kept = dict(zip(self._graph.weights, (w.detach().clone() for w in weights), strict=True))

        def run(inputs: list[Tensor]) -> list[Tensor]:
            given = dict(zip(self._graph.activations, inputs, strict=True))
            values = {**kept, **given}
            return list(self._graph.module(*[values[i] for i in range(len(values))]))

        return run, range(len(weights))


def copying(policy: Any) -> Callable[..., Any]:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_captured(Copying(), gm, inputs, Options(freezing=policy))

    return backend


def vendor(name: str) -> Callable[[Any], Any]:
    return lambda policy: dynamo_backends.compiler(name, freezing=policy)


# A backend that freezes weights is one row more.
FREEZING: dict[str, Callable[[Any], Any]] = {
    "copying": copying,
    "openxla": vendor("openxla"),
    "onnxrt": vendor("onnxrt"),
    "iree": vendor("iree"),
    "ov": vendor("ov"),
    "ofi": vendor("ofi"),
    "static_runtime": vendor("static_runtime"),
    "onednn_graph": vendor("onednn_graph"),
    "inductor_freezing": vendor("inductor_freezing"),
    "inductor_max_autotune": vendor("inductor_max_autotune"),
    "ltc": vendor("ltc"),
    "ltc_trace": vendor("ltc_trace"),
    "ts_trace": vendor("ts_trace"),
    "tvm": vendor("tvm"),
}
EACH = [long_if(name == "inductor_max_autotune", name) for name in FREEZING]  # tunes at each change


def net() -> nn.Module:
    """Weights that are folded (conv + batch norm), transformed (Winograd) and read as they are."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(), nn.Linear(8 * 16, 5),
    ).eval()  # fmt: skip


def steps(**settings: Any) -> Callable[[nn.Module], None]:
    def apply(module: nn.Module) -> None:
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        torch.optim.AdamW(module.parameters(), lr=0.1, **settings).step()

    return apply


def each(change: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    def apply(module: nn.Module) -> None:
        with torch.no_grad():
            for p in module.parameters():
                change(p)

    return apply


def new_data(p: Tensor) -> None:
    p.data = p.data * 1.5


def numpy_write(p: Tensor) -> None:
    p.detach().numpy()[...] *= 1.5


def low_rank(module: nn.Module) -> None:
    """As LoRA merges its product into a new Parameter."""
    for i in (0, 3, 5):
        weight = module[i].weight.detach()
        product = torch.randn(weight.shape[0], 2) @ torch.randn(2, weight[0].numel())
        module[i].weight = nn.Parameter(weight + product.view_as(weight))


def low_rank_in_place(module: nn.Module) -> None:
    for i in (0, 3, 5):
        weight = module[i].weight.data
        product = torch.randn(weight.shape[0], 2) @ torch.randn(2, weight[0].numel())
        weight += product.view_as(weight)


def load(assign: bool) -> Callable[[nn.Module], None]:
    return lambda module: void(module.load_state_dict(net().state_dict(), assign=assign))


def void(_: object) -> None:
    """Drops a result."""


def buffer_update(module: nn.Module) -> None:
    module[1].running_mean.add_(1)
    module[1].running_var.mul_(2)


def new_buffer(module: nn.Module) -> None:
    module[1].running_mean = module[1].running_mean + 1


def dtype_and_back(module: nn.Module) -> None:
    module.double()
    for p in module.parameters():
        p.data.mul_(1.5)
    module.float()


def as_vector(module: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters()) * 1.5
    nn.utils.vector_to_parameters(vector, module.parameters())


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "optimizer": steps(foreach=False, fused=False),
    "optimizer foreach": steps(foreach=True),
    "optimizer fused": steps(fused=True),
    "load_state_dict": load(assign=False),
    "load_state_dict assign": load(assign=True),
    "data.add_": each(lambda p: p.data.add_(0.5)),
    "data.normal_": each(lambda p: p.data.normal_()),
    "data.mul_": each(lambda p: p.data.mul_(1.5)),
    "copy_": each(lambda p: p.copy_(torch.randn_like(p))),
    "detach": each(lambda p: p.detach().add_(0.5)),
    "storage": each(lambda p: p.untyped_storage().copy_((p * 2).untyped_storage())),
    "set_": each(lambda p: p.set_(torch.randn_like(p))),
    "numpy": each(numpy_write),
    "dlpack": each(lambda p: torch.from_dlpack(p.detach()).mul_(1.5)),
    "data =": each(new_data),
    "vector_to_parameters": as_vector,
    "low rank, new Parameter": low_rank,
    "low rank, in place": low_rank_in_place,
    "buffer in place": buffer_update,
    "new buffer": new_buffer,
    "dtype and back": dtype_and_back,
    "other dtype": lambda module: void(module.double()),
}


def apply(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def check_way(compiled: Callable[[nn.Module, Tensor], Tensor], way: str) -> None:
    """Compiled and eager results before and after a change, the latter judged by float64."""
    module, x = net(), torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        before = module(x)
        torch.testing.assert_close(compiled(module, x), before)
    WAYS[way](module)
    x = x.to(module[0].weight.dtype)
    with torch.no_grad():
        expected = module(x)
        assert way == "other dtype" or not torch.allclose(before, expected), "it must matter"
        assert_same(expected, compiled(module, x), copy.deepcopy(module).double()(x.double()))


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        long_if(backend not in ("copying", "openxla") and (i + j) % 4 != 0, backend, way)
        for i, backend in enumerate(FREEZING)
        for j, way in enumerate(WAYS)
    ],
)
def test_a_change_is_seen_at_the_next_call(backend: str, way: str):
    check_way(torch.compile(apply, backend=FREEZING[backend]("probe")), way)


@pytest.mark.parametrize("policy", ["strict", "off"])
@pytest.mark.parametrize("backend", EACH)
def test_the_other_policies_see_every_change(backend: str, policy: str):
    compiled = torch.compile(apply, backend=FREEZING[backend](policy))
    for way in WAYS:
        check_way(compiled, way)


@pytest.mark.parametrize("backend", EACH)
def test_each_weight_alone(backend: str):
    module, x = net(), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(module, backend=FREEZING[backend]("probe"))
    with torch.no_grad():
        compiled(x)
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.data.add_(0.5)
                torch.testing.assert_close(compiled(x), module(x), msg=name)


@pytest.mark.parametrize("backend", EACH)
def test_one_element_through_an_alias_is_seen_by_the_strict_policy(backend: str):
    module, x = net(), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(module, backend=FREEZING[backend]("strict"))
    with torch.no_grad():
        compiled(x)
        module[3].weight.detach().numpy()[5, 2, 0, 1] += 7
        torch.testing.assert_close(compiled(x), module(x))


def test_a_backend_that_copies_would_be_stale_without_the_checks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "dynamo_backends.runtime.weight_binding.WeightSnapshot.is_current", lambda *_: True
    )
    module, x = net(), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(module, backend=copying("probe"))
    with torch.no_grad():
        before = compiled(x)
        WAYS["data.add_"](module)
        assert torch.equal(compiled(x), before)


def rebinds(compiled: Any, changes: Sequence[Callable[[], object]]) -> int:
    with torch.no_grad(), dynamo_backends.record() as reports:
        for change in changes:
            change()
            compiled()
    return sum(r.rebinds for r in reports)


@pytest.mark.parametrize("backend", EACH)
def test_unchanged_weights_are_prepared_once(backend: str):
    module, x = net(), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(module, backend=FREEZING[backend]("probe"))
    assert rebinds(lambda: compiled(x), [lambda: None] * 5) == 0


def test_an_optimizer_of_another_model_changes_nothing():
    module, other, x = net(), net(), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(module, backend=copying("probe"))
    assert rebinds(lambda: compiled(x), [lambda: steps(fused=True)(other)] * 5) == 0


@pytest.mark.parametrize("backend", EACH)
def test_weights_that_keep_changing_are_right_and_frozen_again_when_they_rest(backend: str):
    module, x = net(), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(module, backend=FREEZING[backend]("probe"))

    def change() -> None:
        module[0].weight.data.mul_(0.9)

    def check() -> None:
        torch.testing.assert_close(compiled(x), module(x))

    with torch.no_grad(), dynamo_backends.record() as reports:
        for _ in range(20):
            change()
            check()
        for _ in range(20):
            check()
        settled = sum(r.rebinds for r in reports)
        for _ in range(5):
            check()
        assert sum(r.rebinds for r in reports) == settled < 40
        change()
        check()
