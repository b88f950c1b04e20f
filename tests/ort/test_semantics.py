"""What torch promises beyond values, by the list that `tests/test_semantics.py` has."""

import copy
import functools

import pytest
import torch
from torch import nn

import dynamo_backends
import tests.test_semantics as semantics
from tests.checking import check, same

ONNXRT = dynamo_backends.compiler("onnxrt", min_block_size=1)

# The assertions of these are about openxla having every operator that they use.
NOT_SHARED = {
    "test_gradients_are_right",
    "test_random_numbers_equal_eagers_and_differ_between_calls",
}


@pytest.fixture(autouse=True)
def _through_onnxrt(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_fallbacks(*args: object, **settings: object) -> object:
        settings["ops_in_eager"] = None
        return check(*args, backend="onnxrt", min_block_size=1, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(semantics, "OPENXLA", ONNXRT)
    monkeypatch.setattr(semantics, "check", functools.wraps(check)(any_fallbacks))


for _name, _test in vars(semantics).items():
    if _name.startswith("test_") and _name not in NOT_SHARED:
        globals()[_name] = _test


def test_random_numbers_equal_eagers():
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = torch.nn.functional.dropout(x * 2, 0.5, training=True)
        return torch.nn.functional.dropout(a + torch.rand_like(x), 0.3, training=True)

    check(fn, torch.randn(3, 4), ops_in_eager=None, backend="onnxrt")


def test_gradients_are_right():
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    x = torch.randn(5, 6)
    with dynamo_backends.record() as reports:
        torch.compile(model, backend=ONNXRT)(x).square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    theirs = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    precise = copy.deepcopy(model).double()
    precise(x.double()).square().sum().backward()
    same(theirs, ours, [p.grad for p in precise.parameters()])
    assert {r.kind for r in reports} == {"forward", "backward"}
    assert all(r.ops_on_backend > 0 for r in reports), reports
