"""Inference on devices that a CPU is divided into equals eager; weights are split once."""

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

from dynamo_backends import compile_step, record
from dynamo_backends.interface.errors import OptionError, StepCaptureError
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.interface.report import GraphReport
from tests.xla.test_mesh_steps import CASES, NAMES, cast
from tests.xla.trainers import of_squares

MESH = {"data": 2, "model": 4}
ROWS, COLUMNS = [Replicate(), Shard(0)], [Replicate(), Shard(1)]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(3)
    yield
    torch._dynamo.reset()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().eval()


SPLIT = {"mesh": MESH, "placements": {"0.*": ROWS, "2.weight": COLUMNS}}


def compiled(model: Any, **options: Any) -> Any:
    options = {"fallback": "error", **SPLIT, **options}
    return torch.compile(model, backend="openxla", options=options)


def check(model: nn.Module, run: Any, batches: list[Tensor]) -> list[GraphReport]:
    """Compares calls with eager; the reports of what they compiled."""
    with record() as reports, torch.no_grad():
        for batch in batches:
            torch.testing.assert_close(run(batch), model(batch), rtol=1e-10, atol=1e-10)
    return reports


def inputs(*sizes: int) -> list[Tensor]:
    return [torch.randn(n, 8, dtype=torch.float64) for n in sizes]


@pytest.mark.parametrize("parallel", ["data", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_results_are_eagers_and_weights_are_split_once(name: str, parallel: str):
    case = CASES[name]
    model = case.make().double().eval()
    options = {"mesh": MESH, "placements": case.placements}
    if parallel == "data":
        options = {"mesh": {"data": 8}, "placements": None}
    run = compiled(model, **options)
    (report,) = check(model, run, [cast(case.inputs(), torch.float64) for _ in range(3)])
    assert (report.blocks, report.ops_in_eager, report.rebinds, report.verified) == (1, 0, 0, 1)
    assert report.mesh is not None
    split = [p for p in report.mesh.parameters if p.placement.endswith("over model")]
    assert bool(split) == (parallel == "tensor")
    assert report.mesh.collectives or not split


def test_each_device_holds_its_part():
    model = net()
    (report,) = check(model, compiled(model), inputs(8))
    assert report.mesh is not None
    placed = {p.name.partition(".")[2]: p for p in report.mesh.parameters}
    assert placed["0.weight"].placement == "Shard(0) over model"
    assert placed["0.weight"].bytes == 16 * 8 * 8 // 4
    assert placed["2.bias"].placement == "Replicate"
    held = sum(p.bytes for p in placed.values()) + 8 * 8 * 8 // 2  # half of the batch
    assert report.mesh.argument_bytes == held


def test_weights_that_change_are_split_again():
    model = net()
    run = compiled(model)
    (report,) = check(model, run, inputs(8, 8))
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert not check(model, run, inputs(8, 8))
    assert report.rebinds == 1


def test_other_sizes_also_those_that_do_not_divide():
    model = net()
    check(model, compiled(model), inputs(8, 6, 5, 1))


def test_a_graph_that_updates_a_buffer():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.sum(0))
            return self.inner(x) + self.seen.sum()

    model = Counting()
    given = inputs(8, 8)
    with torch.no_grad():
        expected = [model(x) for x in given]
        model.seen.zero_()
        run = compiled(model, placements={"inner.0.*": ROWS})
        for x, y in zip(given, expected, strict=True):
            torch.testing.assert_close(run(x), y)


def test_a_model_that_was_trained_on_the_mesh_and_goes_on_there():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = compile_step(of_squares(model, optimizer), model=model, optimizer=optimizer, **SPLIT)
    run = compiled(model)
    for x in inputs(8, 8):
        step(x)
        with torch.no_grad():
            torch.testing.assert_close(run(x), net_of(model)(x), rtol=1e-10, atol=1e-10)


def net_of(model: nn.Module) -> nn.Module:
    """The same model on the host, in eager."""
    copy = net()
    state = {k: torch.tensor(v.tolist(), dtype=v.dtype) for k, v in model.state_dict().items()}
    copy.load_state_dict(state)
    return copy


def test_a_name_that_no_weight_has_is_said(caplog: pytest.LogCaptureFixture):
    model = net()
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        check(model, compiled(model, placements={"0.weigth": ROWS}), inputs(8))
    assert "which matches no weight of this graph. Did you mean '0.weight'?" in caplog.text


def test_training_is_left_to_compile_step():
    with pytest.raises(Exception, match=r"torch\.no_grad.*compile_step"):
        compiled(net())(inputs(8)[0])


def test_a_weight_that_does_not_divide():
    run = compiled(net(), placements={"2.weight": [Shard(0), Shard(0)]})
    with torch.no_grad(), pytest.raises(Exception, match="needs a dimension 0 that 8 divides"):
        run(inputs(8)[0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mesh": 8}, r"mesh must be a torch DeviceMesh or a dict"),
        ({"placements": {"*": [Shard(0)]}}, r"option 'placements' needs a mesh"),
        ({"batch_placements": [Shard(0)]}, r"option 'batch_placements' needs a mesh"),
        ({"mesh": MESH, "placements": {"*": [Shard(0)]}}, r"placements\['\*'\] must be one"),
        (
            {"mesh": MESH, "batch_placements": [Partial(), Shard(0)]},
            r"Partial placements are not supported",
        ),
        ({"mesh": MESH, "while_compiling": "eager"}, r"a mesh compiles synchronously"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], text: str):
    backend = get_backend("openxla")
    with pytest.raises(OptionError, match=text):
        backend.Options.parse(options, "openxla")


def test_compile_step_has_an_argument_of_its_own():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train = of_squares(model, optimizer)
    step = compile_step(train, model=model, optimizer=optimizer, options={"mesh": MESH})
    x = inputs(8)[0]
    with pytest.raises(StepCaptureError, match=r"compile_step\(\.\.\., mesh="):
        deque(map(step, (x, x)))  # the first may be recorded
