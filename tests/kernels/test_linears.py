"""Linear layers by oneDNN: where Inductor's graphs call it, and that their results are right."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends.inductor import runtime
from dynamo_backends.kernels import linears
from dynamo_backends.kernels.linears import PACK
from tests.backend_checks import threads_agree
from tests.inductor.checking import check
from tests.kernels.planted import always, plant


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes of the weights that are packed for oneDNN, which always wins."""
    found: list[Any] = []
    multiply_by_onednn = runtime.multiply_by_onednn

    def spy(module: Any) -> None:
        multiply_by_onednn(module)
        for node in module.graph.find_nodes(op="call_function", target=PACK):
            turned = node.args[0].args[0]
            found.append(tuple(turned.meta["val"].shape))

    monkeypatch.setattr(runtime, "multiply_by_onednn", spy)
    always(monkeypatch, "oneDNN")
    monkeypatch.setattr(linears, "_LEAST", 1)
    return found


ACTIVATIONS = [nn.Identity(), nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh()]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_activation(calls: list[Any], activation: nn.Module, bias: bool):
    torch.manual_seed(0)
    check(nn.Sequential(nn.Linear(40, 24, bias), activation), torch.randn(19, 40))
    assert calls == [(40, 24)]


def test_layers_of_sequences_with_a_residual(calls: list[Any]):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(nn.functional.gelu(self.up(x)))

    torch.manual_seed(0)
    check(Block(), torch.randn(2, 17, 32))
    assert calls == [(32, 64), (64, 32)]


def test_a_weight_that_stands_as_in_the_product(calls: list[Any]):
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(40, 24))
            self.b = nn.Parameter(torch.randn(24))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.b, x, self.w) + torch.mm(x, self.w)

    torch.manual_seed(0)
    check(Turned(), torch.randn(19, 40))
    assert calls == [(40, 24)] * 2


def test_an_input_that_is_not_dense(calls: list[Any]):
    torch.manual_seed(0)
    check(nn.Linear(40, 24), torch.randn(40, 19).t())
    check(nn.Linear(40, 24), torch.randn(1, 40).expand(19, 40))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "x", [torch.randn(19, 40, dtype=torch.float64), torch.randn(0, 40)], ids=["float64", "empty"]
)
def test_what_is_left_to_inductor(calls: list[Any], x: Tensor):
    check(nn.Linear(40, 24, dtype=x.dtype), x)
    assert not calls


def test_weights_are_never_stale(calls: list[Any]):
    torch.manual_seed(0)
    model, x = nn.Linear(40, 24), torch.randn(19, 40)
    compiled = check(model, x)
    with torch.no_grad():
        model.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(calls) == 2


@pytest.mark.usefixtures("calls")
def test_from_several_threads():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 8))
    x = torch.randn(19, 40)
    threads_agree(check(model, x), model, 19, 40)


@pytest.mark.parametrize("ranged", [False, True])
def test_which_library_needs_no_lead(monkeypatch: pytest.MonkeyPatch, ranged: bool):
    preferred: list[str] = []

    def race(way: str, *_: Any) -> str:
        preferred.append(way)
        return way

    plant(monkeypatch, race)
    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(160, 200), backend="inductor_freezing", dynamic=ranged)
    with torch.no_grad():
        compiled(torch.randn(19, 160))
    assert preferred == ["MKL" if ranged else "oneDNN"]


def test_the_faster_library_is_measured(monkeypatch: pytest.MonkeyPatch):
    raced: list[Any] = []

    def race(preferred: str, runs: Any, layouts: Any) -> str:
        x = torch.randn(layouts[0][0])
        results = [run([x])[0] for run in runs.values()]
        torch.testing.assert_close(*results)
        raced.append((preferred, sorted(runs)))
        return "MKL"

    plant(monkeypatch, race)
    check(
        nn.Sequential(nn.Linear(160, 200), nn.Linear(200, 160), nn.Linear(160, 5)),
        torch.randn(19, 160),
    )
    assert raced == [("oneDNN", ["MKL", "oneDNN"])] * 2, "the last one is small"
