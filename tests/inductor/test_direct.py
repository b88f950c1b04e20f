"""Graphs go to Inductor decomposed, and AOT Autograd does not trace them once more."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends.inductor import runtime
from dynamo_backends.inductor.decompositions import decompose_for_inductor
from tests.inductor.checking import EXACT, check
from tests.trials.test_trials import fake_call

aten = torch.ops.aten


class Block(nn.Module):
    """What Inductor wants decomposed, with weights on both sides of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(nn.functional.gelu(self.first(x)))
        return (self.last(hidden) * hidden.std(-1, keepdim=True)).softmax(-1)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is compiled by way of AOT Autograd."""
    found: list[Any] = []
    plain = runtime.compile_frozen_with_inductor

    def record(module: Any, *rest: Any) -> Any:
        found.append(module)
        return plain(module, *rest)

    monkeypatch.setattr(runtime, "compile_frozen_with_inductor", record)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def test_a_graph_with_weights_is_not_traced_again(traced: list[Any]):
    check(Block(), torch.randn(6, 32), EXACT)
    assert not traced


def test_calls_are_decomposed_that_inductor_wants_decomposed():
    node = fake_call(aten.native_layer_norm.default, torch.empty(4, 8, device="meta"), [8], None,
                     None, 1e-5, read=(0,))  # fmt: skip
    node.graph.output(tuple(node.users))
    decompose_for_inductor(node.graph)
    targets = {n.target for n in node.graph.nodes if n.op == "call_function"}
    assert aten.native_layer_norm.default not in targets
    assert any("rsqrt" in str(t) for t in targets)


class Handing(nn.Module):
    """Its second result is a weight, or a view of one."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self._view = nn.Linear(8, 8), view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self._view(self.linear.weight)


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.t(), lambda w: w.detach()[2:]])
def test_weights_that_are_handed_out_share_memory(view: Callable[[Tensor], Tensor]):
    model = Handing(view).eval()
    compiled = torch.compile(model, backend="inductor_freezing")
    with torch.no_grad():
        for _ in range(2):
            result, weight = compiled(torch.ones(3, 8))
        assert weight.untyped_storage().data_ptr() == (
            model.linear.weight.untyped_storage().data_ptr()
        )
        torch.testing.assert_close(result, model(torch.ones(3, 8))[0])


@pytest.mark.parametrize("error", [AttributeError("gone"), TypeError("another argument")])
def test_another_inductor_traces_the_graph(
    traced: list[Any], error: Exception, monkeypatch: pytest.MonkeyPatch
):
    def changed(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(runtime, "compile_decomposed_with_inductor", changed)
    check(Block(), torch.randn(6, 32), EXACT)
    assert len(traced) == 1
