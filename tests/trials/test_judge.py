"""Where a reference in float64 decides, and where a look at eager's result is enough."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends.trials import judge
from dynamo_backends.trials.judge import Judge
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
