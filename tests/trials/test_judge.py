"""Where a reference in float64 decides, and where a look at eager's result is enough."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends.trials import judge
from dynamo_backends.trials.judge import EagerRefused, Judge
from tests.trials.test_trials import call_of

aten = torch.ops.aten


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The references that were computed."""
    made: list[Any] = []
    original = judge.in_float64

    def counted(module: Any) -> Any:
        made.append(module)
        return original(module)

    monkeypatch.setattr(judge, "in_float64", counted)
    return made


def test_what_is_near_needs_no_reference(references: list[Any]) -> None:
    a, b = torch.randn(30, 400), torch.randn(400, 20) * 50
    near = lambda args: [(args[0].double() @ args[1].double()).float()]  # noqa: E731
    assert Judge(call_of(aten.mm.default, a, b))(near, [a, b]) is None
    x = torch.tensor([1.0, float("nan"), float("inf"), -3.0])
    assert Judge(call_of(aten.relu.default, x))(lambda args: [args[0].relu()], [x]) is None
    n = torch.tensor([1, 2**40])
    assert Judge(call_of(aten.neg.default, n))(lambda args: [-args[0]], [n]) is None
    assert not references


def test_what_is_not_near_is_measured_by_the_reference(references: list[Any]) -> None:
    """Eager sums in float32 what cancels; one that is more precise is right, however far off."""
    x = torch.cat([torch.tensor([1e8, 1.0, -1e8]), torch.zeros(40)])
    graph = call_of(aten.sum.default, x)
    precise = x.double().sum().float()
    assert abs(graph.module(x)[0] - precise) > 0.1
    assert Judge(graph)(lambda args: [args[0].sum()], [x]) is None
    assert not references
    wrong = Judge(graph)(lambda args: [args[0].sum() + 5], [x])
    assert wrong is not None
    assert len(references) == 1


@pytest.mark.parametrize("off", [2e-4, 1e-3, 0.1])
def test_what_is_wrong_is_wrong(off: float) -> None:
    def spoiled(args: list[Tensor]) -> list[Tensor]:
        return [args[0] @ args[1] + off * (args[0] @ args[1]).abs().max()]

    a, b = torch.randn(30, 40), torch.randn(40, 20)
    assert Judge(call_of(aten.mm.default, a, b))(spoiled, [a, b]) is not None


def test_indices_out_of_bounds_do_not_reach_a_device() -> None:
    """A CPU says so; what runs on a GPU after such a kernel fails, whatever it is."""
    x, places = torch.randn(1, 2), torch.tensor([0, 0])
    for target in (aten.embedding.default, aten.take.default):
        judge = Judge(call_of(target, x, places))
        judge._hold_indices([x, places])
        with pytest.raises(EagerRefused):
            judge._hold_indices([x, places + 2])
    whole = torch.ones(3, 2, dtype=torch.int8)
    Judge(call_of(aten.add.Tensor, whole, whole))._hold_indices([whole, whole])


@pytest.mark.parametrize(
    ("target", "given"),
    [
        (aten.index_select.default, (torch.randn(3, 2), 0, torch.tensor([1, 3]))),
        (aten.gather.default, (torch.randn(3, 2), 0, torch.tensor([[1, 3]]))),
        (aten.index.Tensor, (torch.randn(3, 2), [torch.tensor([1, 3])])),
        (aten.nll_loss_forward.default,
         (torch.randn(2, 3), torch.tensor([1, 3]), None, 1, -100)),
    ],
)  # fmt: skip
def test_torchs_errors_of_indices_are_known(target: Any, given: tuple[Any, ...]) -> None:
    with pytest.raises((IndexError, RuntimeError)) as raised:
        target(*given)
    assert judge._OUT_OF_BOUNDS.search(str(raised.value))
