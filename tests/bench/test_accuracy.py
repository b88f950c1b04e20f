from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends.bench import accuracy
from harness import check, compare_outputs, randomize_weights

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    randomize_weights(layers, lambda: None)
    return layers


def test_eager_is_as_accurate_as_eager() -> None:
    layers = model()
    accuracy = check(layers, layers, (X,))
    assert accuracy.passed
    assert (accuracy.max_abs, accuracy.max_rel, accuracy.detail) == (0.0, 0.0, "")


def test_small_differences_pass_and_are_reported() -> None:
    layers = model()
    accuracy = check(layers, lambda x: layers(x) + 1e-5, (X,))
    assert accuracy.passed
    assert accuracy.max_abs == pytest.approx(1e-5, rel=0.1)
    assert accuracy.max_rel == pytest.approx(1e-5 / layers(X).abs().max().item(), rel=0.1)


def test_more_accurate_than_eager_passes_however_far_from_it() -> None:
    precise = torch.ones(100, dtype=torch.float64)
    expected = torch.full((100,), 1.05)
    assert compare_outputs(expected, torch.full((100,), 1.001), precise).passed
    assert not compare_outputs(expected, torch.full((100,), 1.5), precise).passed


def test_results_may_err_as_eager_does_in_a_lower_precision() -> None:
    precise = torch.ones(100, dtype=torch.float64)
    expected, allowed = torch.ones(100), torch.full((100,), 1.01)
    near, far = torch.full((100,), 0.985), torch.full((100,), 0.95)
    accuracy = compare_outputs(expected, near, precise, allowed=allowed)
    assert accuracy.passed
    assert accuracy.max_rel == pytest.approx(0.015, rel=1e-3)
    assert not compare_outputs(expected, near, precise).passed
    assert not compare_outputs(expected, far, precise, allowed=allowed).passed


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (lambda y: y + 0.01, "output 0 differs from eager by up to"),
        (lambda y: y.double(), "output 0 is float64[3, 2] instead of float32[3, 2]"),
        (lambda y: y[:, :1], "output 0 is float32[3, 1] instead of float32[3, 2]"),
        (lambda y: y * float("nan"), "output 0 has NaN where eager has not, or the reverse"),
        (lambda y: (y,), "the outputs have the structure"),
        (lambda y: None, "output 0 is a NoneType instead of a Tensor"),
    ],
)
def test_wrong_results_fail_with_a_reason(wrong: Callable[[Tensor], Any], detail: str) -> None:
    layers = model()
    accuracy = check(layers, lambda x: wrong(layers(x)), (X,))
    assert not accuracy.passed
    assert detail in accuracy.detail


def test_a_result_that_broadcasts_is_wrong() -> None:
    same = torch.ones(4, 1)
    accuracy = compare_outputs(same, torch.ones(4), same.double())
    assert not accuracy.passed


def test_integers_must_be_equal() -> None:
    numbers = torch.arange(5)
    other = torch.tensor([0, 1, 2, 3, 5])
    assert compare_outputs(numbers, numbers.clone(), numbers).passed
    accuracy = compare_outputs(numbers, other, numbers)
    assert accuracy.detail == "output 0 differs from eager in 1 elements"
    assert accuracy.max_abs == 1


def test_plain_values_must_be_equal() -> None:
    accuracy = compare_outputs((3, None), (4, None), (3, None))
    assert accuracy.detail == "output 0 is 4 instead of 3"


def test_equal_infinities_and_nans_are_no_difference() -> None:
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0])
    accuracy = compare_outputs(values, values.clone(), values.double())
    assert accuracy.passed
    assert accuracy.max_abs == 0


def test_inputs_are_not_changed() -> None:
    class Mutates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    x = torch.zeros(3)
    assert check(Mutates(), Mutates(), (x,)).passed
    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_large_outputs_are_compared_in_parts(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_CHUNK", chunk)
    expected = torch.tensor([[1.0, -4.0, torch.inf], [torch.nan, 2.0, 0.5]])
    result = expected.clone()
    assert accuracy.distance(expected, result) == (0.0, 0.0)
    result[1, 2] = 1.5
    assert accuracy.distance(expected, result) == (1.0, 0.25)
    result[1, 1] = torch.nan
    assert accuracy.distance(expected, result) == (torch.inf, torch.inf)
    assert accuracy.distance(torch.tensor([]), torch.tensor([])) == (0.0, 0.0)
