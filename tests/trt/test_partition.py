"""Which calls TensorRT gets: what its parser says, mapped back to the graph."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import dynamo_backends
from dynamo_backends.trt import survey
from tests.checking import check
from tests.doubles.tensorrt import operators
from tests.trt.conftest import ALL, Machine
from tests.trt.helpers import reasons


def found(fn: Any, *inputs: Tensor, **options: Any) -> dict[str, str]:
    """Why operators of a function run in eager; its result is checked."""
    options = {"min_block_size": 1, **options}
    return reasons(check(fn, *inputs, ops_in_eager=None, backend="tensorrt", **options))


@pytest.mark.parametrize("machine", ALL, indirect=True)
def test_what_the_parser_does_not_take_runs_in_eager(machine: Machine):
    def fn(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).relu() + 1
        bits = torch.bitwise_and(i, 6)
        return y * bits, (y.sum(), bits + 1)

    x, i = torch.randn(3, 4, device=machine.device), torch.arange(4, device=machine.device)
    said = found(fn, x, i)
    assert set(said) == {"aten.bitwise_and.Tensor"} or set(said) == {"aten.bitwise_and.Scalar"}
    (reason,) = said.values()
    assert "TensorRT's parser says: BitwiseAnd: " in reason


def test_several_kinds_of_refusal_in_one_graph(double: Machine):
    """A type, a static error, an error that hides another one, and one without a lowering."""

    def fn(x: Tensor, i: Tensor) -> Any:
        best, at = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
        low = torch.nn.functional.max_pool2d(x.exp(), 2, dilation=2)
        return best + 1, at, low * 2, i.double() + 1, torch.special.bessel_j0(x) * 3

    said = found(fn, torch.randn(1, 2, 8, 8), torch.arange(3))
    pool = "aten.max_pool2d_with_indices.default"
    assert said[pool].startswith("TensorRT's parser says: MaxPool: ")
    assert said["aten.add.Tensor"] == "TensorRT does not compute with torch.float64"
    assert said["aten.special_bessel_j0.default"] == "onnxscript has no lowering of it"
    assert not any(op.startswith(("aten.exp", "aten.mul")) for op in said)


def test_small_blocks_are_left_to_eager(double: Machine):
    def fn(x: Tensor) -> Tensor:
        y = torch.special.bessel_j0(x.exp() * 2)
        return ((y + 1).sin() * 3).tanh()

    said = found(fn, torch.rand(8), min_block_size=3)
    small = "its block has 2 operators, fewer than min_block_size=3"
    assert said["aten.exp.default"] == said["aten.mul.Tensor"] == small
    assert "aten.tanh.default" not in said


def test_a_refused_call_is_taken_apart(double: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(operators.SUPPORTED, "HardSwish")
    x = torch.randn(16)
    assert found(torch.nn.functional.hardswish, x) == {}


def test_the_parser_is_asked_until_it_takes_what_is_left(
    double: Machine, monkeypatch: pytest.MonkeyPatch
):
    """Errors of importing come one at a time."""
    monkeypatch.setattr(operators, "restriction", _dislikes)
    asked = []
    parser = sys.modules["tensorrt"].OnnxParser
    original = parser.supports_model_v2

    def count(self: Any, *args: Any) -> bool:
        asked.append(args)
        return original(self, *args)

    monkeypatch.setattr(parser, "supports_model_v2", count)
    said = found(lambda x: ((x.cosh() + 1) * x.sinh()).acosh() - 2, torch.rand(4) + 1)
    assert set(said) == {"aten.cosh.default", "aten.sinh.default", "aten.acosh.default"}
    assert len(asked) > 3


def _dislikes(node: Any, rank: int | None) -> str | None:
    hated = ("Cosh", "Sinh", "Acosh", "Sqrt", "Exp", "Log")
    return "this layer is not loved" if node.op_type in hated else None


def test_complex_and_ragged_things_stay_in_eager(double: Machine):
    said = found(lambda x: (x * 2).real + 1, torch.randn(3, dtype=torch.complex64))
    assert said["aten.mul.Tensor"] == "TensorRT does not compute with torch.complex64"


def test_nothing_is_asked_twice(double: Machine, monkeypatch: pytest.MonkeyPatch):
    def fn(x: Tensor) -> Tensor:
        return (x.sin() + 1).cos() * 2

    x = torch.randn(7)
    check(fn, x, backend="tensorrt", cache=False)
    monkeypatch.setattr(survey, "survey", None)
    torch._dynamo.reset()
    check(fn, x, backend="tensorrt", cache=False)


def test_fallback_error_names_the_operator(double: Machine):
    with pytest.raises(Exception, match=r"tensorrt cannot run aten\.special_bessel_j0"):
        torch.compile(torch.special.bessel_j0, backend="tensorrt", options={"fallback": "error"})(
            torch.ones(3)
        )
    assert dynamo_backends.get_backend("tensorrt").name == "tensorrt"
