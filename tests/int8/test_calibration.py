"""Batches: how they are given, which are held out, and which inputs of a graph they are."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import FallbackRefusedError, OptionError, compiler
from dynamo_backends.int8.calibration import Arguments, Calibration, split
from tests.int8.planted import Net, batches, net

OPTIONS = {"precision": "int8", "tolerance": {"cosine": 0.99}}


def run(model: nn.Module, *inputs: Tensor, backend: str = "planted_int8", **options: Any) -> Any:
    given = {**OPTIONS, **options}
    with torch.no_grad(), dynamo_backends.record() as reports:
        result = torch.compile(model, backend=compiler(backend), options=given)(*inputs)
    return result, reports


def test_every_third_is_held_out():
    assert split(2) == ([0], [1])
    assert split(3) == ([0, 1], [2])
    assert split(7) == ([0, 1, 3, 4, 6], [2, 5])


def test_contents_make_batches_equal():
    first, second = Calibration.parse(batches(), "ov"), Calibration.parse(batches(), "ov")
    assert first == second
    assert hash(first) == hash(second)
    assert repr(first) == f"Calibration(6 batches, {first.digest})"
    assert first != Calibration.parse([b + 1 for b in batches()], "ov")
    assert first != Calibration.parse([{"x": b} for b in batches()], "ov")
    assert copy.deepcopy(first) is first


def test_what_becomes_of_the_users_tensors_does_not_matter():
    given = batches()
    calibration = Calibration.parse(given, "ov")
    given[0].zero_()
    assert calibration == Calibration.parse(batches(), "ov")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.rand(4, 3), "not a Tensor"),
        ({"x": torch.rand(3)}, "not a dict"),
        ([torch.rand(3)], "has 1 batches, but needs at least 2"),
        ([1, 2, 3], "one batch is a int"),
    ],
)
def test_what_are_no_batches_is_said(given: Any, said: str):
    with pytest.raises(OptionError) as raised:
        Calibration.parse(given, "ov")
    assert said in str(raised.value)
    assert "calibration=[...], a list of batches" in str(raised.value)


def test_arguments_are_found_by_names_and_positions():
    arguments = Arguments(("x", "mask"), "rest", "kwargs")
    assert [arguments.key(t) for t in ("x", "mask", "rest[1]", "kwargs['y']")] == [
        "x",
        "mask",
        3,
        "y",
    ]
    assert [arguments.key(t) for t in ("y", "other[0]", "x.y", "self.w")] == [None] * 4
    assert arguments.named(["a", "b", "c"]) == {"x": "a", "mask": "b", 0: "a", 1: "b", 2: "c"}


class Sum(nn.Module):
    """Reads its second argument first, so that the graph's inputs are in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.net(x, shift * 2)


SHIFT = torch.full((16, 48), 0.5)


@pytest.mark.usefixtures("plant")
@pytest.mark.parametrize(
    "given",
    [
        [{"shift": SHIFT, "x": b} for b in batches()],
        [(b, SHIFT) for b in batches()],
        ([b, SHIFT] for b in batches()),
    ],
    ids=["by name", "in order", "an iterator of lists"],
)
def test_batches_are_given_as_the_model_is_called(given: Any):
    x = batches()[0]
    model = Sum()
    result, (report,) = run(model, x, SHIFT, calibration=given)
    assert report.events == []
    assert report.measured["cosine"] > 0.999
    with torch.no_grad():
        assert not torch.equal(result, model(x, SHIFT))


@pytest.mark.usefixtures("plant")
def test_modules_of_torchs_own_are_called_with_any_arguments():
    model = nn.Sequential(net().first, nn.ReLU(), net().second)
    _, (report,) = run(model, batches()[0], calibration=batches())
    assert report.measured["cosine"] > 0.999


@pytest.mark.usefixtures("plant")
@pytest.mark.parametrize("backend", ["planted_int8", "autotune"])
def test_an_argument_that_is_missing_is_an_error(backend: str):
    more = {"candidates": ["planted_int8"]} if backend == "autotune" else {}
    with pytest.raises(OptionError) as raised:
        run(Sum(), batches()[0], SHIFT, calibration=batches(), backend=backend, **more)
    text = str(raised.value)
    assert "batch 0 of calibration has no 'shift', which the model reads" in text
    assert "it has 1 in order" in text


@pytest.mark.usefixtures("plant")
def test_batches_of_other_sizes_do_not_count():
    mixed = [*batches(), *(b[:5] for b in batches(3))]
    _, (report,) = run(net(), batches()[0], calibration=mixed)
    assert report.measured["cosine"] > 0.999


@pytest.mark.usefixtures("plant")
def test_without_batches_of_a_graphs_sizes_it_runs_in_eager():
    x = torch.rand(7, 64)
    result, (report,) = run(net(), x, calibration=batches())
    assert report.reverted.startswith("only 0 of 6 calibration batches have the dtypes and shapes")
    assert "(x: float32[7, 64])" in report.reverted
    with torch.no_grad():
        assert torch.equal(result, net()(x))


@pytest.mark.usefixtures("plant")
def test_it_is_raised_where_eager_is_refused():
    with pytest.raises(FallbackRefusedError, match="only 0 of 6 calibration batches"):
        run(net(), torch.rand(7, 64), calibration=batches(), fallback="error")


@pytest.mark.usefixtures("plant")
def test_autotune_says_it_in_the_table_and_lets_the_others_compete():
    x = torch.rand(7, 64)
    options = {"candidates": ["planted_int8"], "calibration": batches()}
    _, (report,) = run(net(), x, backend="autotune", **options)
    rows = {row.name: row for row in report.candidates}
    assert "0 of 6 calibration batches" in rows["planted_int8@int8"].reason
    assert rows["planted_int8"].error is not None


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        torch._dynamo.graph_break()
        return y.exp() + y


@pytest.mark.usefixtures("plant")
def test_a_graph_that_reads_no_argument_runs_in_eager():
    _, (first, second) = run(Broken().eval(), batches()[0], calibration=batches())
    assert first.measured["cosine"] > 0.99
    assert "which is not an argument of the model" in second.reverted


@pytest.mark.usefixtures("plant")
def test_symbolic_sizes_are_refused_in_words():
    with torch.no_grad(), dynamo_backends.record() as reports:
        given = {**OPTIONS, "calibration": batches()}
        compiled = torch.compile(
            net(), backend=compiler("planted_int8"), options=given, dynamic=True
        )
        x = batches()[0]
        assert torch.equal(compiled(x), net()(x))
    (report,) = reports
    assert "compile with dynamic=False" in report.reverted
