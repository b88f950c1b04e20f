"""Life with a model on a mesh: checkpoints, edits, gradients, evaluation, many steps at once."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from dynamo_backends import compile_step, record
from dynamo_backends.interface.errors import DeviceError, StepCaptureError
from dynamo_backends.runtime.device_tensor import DeviceTensor
from dynamo_backends.xla import to_device
from tests.xla.checkpoints import go_on_from_checkpoints
from tests.xla.ranks import ROOT

MESH = {"data": 4, "model": 2}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(7)
    yield
    torch._dynamo.reset()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8, dtype=torch.float64), torch.randint(4, (size,))


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def pair(**settings: Any) -> tuple[Any, ...]:
    """A model on a mesh with its optimizer and step, and the same in eager."""
    eager = net()
    model = copy.deepcopy(eager)
    optimizers = adamw(model), adamw(eager)
    settings = {"mesh": MESH, "parallel": "fsdp", "python": "replay", **settings}
    step = compile_step(
        trainer(model, optimizers[0]), model=model, optimizer=optimizers[0], **settings
    )
    return model, optimizers[0], step, eager, optimizers[1], trainer(eager, optimizers[1])


def assert_equal(model: nn.Module, eager: nn.Module) -> None:
    for found, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=1e-9)


def test_what_lives_on_stays_on_the_mesh_and_parameters_stay_the_same_objects():
    model, optimizer, step, *_ = pair()
    before = list(map(id, model.parameters()))
    loss = step(*batch())
    state = [x for entries in optimizer.state.values() for x in entries.values()]
    assert all(isinstance(x, DeviceTensor) for x in (*model.parameters(), *state, loss))
    assert list(map(id, model.parameters())) == before
    assert model[0].weight.home == "cpu mesh (data=4, model=2)"


def test_checkpoints_are_whole_and_can_be_read_in_eager_and_on_the_mesh():
    go_on_from_checkpoints(pair(), batch, assert_equal)


def test_schedulers_edits_and_copies_between_steps():
    model, optimizer, step, eager, reference, expected = pair()
    kept = None
    for turn in range(5):
        given = batch()
        torch.testing.assert_close(step(*given).item(), expected(*given).item())
        for each in (optimizer, reference):
            each.param_groups[0]["lr"] *= 0.8
        if turn == 1:
            with torch.no_grad():
                for m in (model, eager):
                    m[0].weight[0].zero_()
                    m[2].bias.mul_(0.5)
        if turn == 2:
            kept, contents = model[0].weight.detach().clone(), eager[0].weight.tolist()
    assert step.compilations == 1
    assert kept is not None
    torch.testing.assert_close(kept.tolist(), contents)
    assert_equal(model, eager)


@pytest.mark.long
def test_gradients_from_before_and_after_a_step():
    eager = net()
    model = copy.deepcopy(eager)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, eager)]

    def accumulating(m: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        def train(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return train

    first = batch()
    for m in (model, eager):
        F.cross_entropy(m(first[0]), first[1]).backward()
    run = accumulating(model, optimizers[0])
    step = compile_step(run, model=model, optimizer=optimizers[0], mesh={"data": 8})
    expected = accumulating(eager, optimizers[1])
    for _ in range(3):
        given = batch()
        step(*given)
        expected(*given)
    assert_equal(model, eager)
    for found, reference in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad.tolist(), reference.grad.tolist())


def test_a_batch_taken_in_parts():
    model, _, step, eager, _, expected = pair(accumulate=2)
    for _ in range(3):
        given = batch(16)
        step(*given)
        expected(*given)
    assert_equal(model, eager)


def test_another_size_of_batch_is_compiled_for_itself():
    model, _, step, eager, _, expected = pair()
    for size in (8, 16, 8):
        given = batch(size)
        step(*given)
        expected(*given)
    assert step.compilations == 2
    assert_equal(model, eager)


def test_evaluation_in_eager_and_after_a_way_back():
    model, _, step, eager, _, expected = pair()
    x, y = batch()
    for _ in range(2):
        step(x, y)
        expected(x, y)
        with torch.no_grad():
            torch.testing.assert_close(model(x).tolist(), eager(x).tolist())
    back = to_device(copy.deepcopy(model), "cpu")
    with torch.no_grad():
        run = torch.compile(back, backend="openxla", options={"fallback": "error"})
        torch.testing.assert_close(run(x).tolist(), eager(x).tolist())


def test_what_does_not_know_of_the_mesh_is_refused():
    model, optimizer, step, *_ = pair()
    x, y = batch()
    step(x, y)
    plain = compile_step(trainer(model, optimizer), model=model, optimizer=optimizer)
    with pytest.raises(DeviceError, match="Pass the mesh to compile_step"):
        plain(x, y)
    run = torch.compile(model, backend="openxla")
    with torch.no_grad(), pytest.raises(Exception, match="move it back with"):
        run(x)


@pytest.mark.long
def test_a_model_comes_back_to_the_host():
    model, _, step, eager, _, expected = pair()
    given = batch()
    step(*given)
    expected(*given)
    to_device(model, "cpu")
    assert not any(isinstance(p, DeviceTensor) for p in model.parameters())
    assert_equal(model, eager)


def test_results_that_have_the_batch_and_those_that_have_not():
    model = net()
    optimizer = adamw(model)

    def train(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, scores, scores.t()

    x, y = batch()
    expected = model(x).tolist()
    step = compile_step(train, model=model, optimizer=optimizer, mesh={"data": 8})
    _, scores, turned = step(x, y)
    torch.testing.assert_close(scores.tolist(), expected)
    torch.testing.assert_close(turned.t().tolist(), expected)


def test_a_torch_device_mesh_and_devices_in_another_order():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        grid = torch.arange(8).flip(0).reshape(4, 2)
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=("data", "model"))
        placements = {"0.weight": [Replicate(), Shard(-2)]}
        model, _, step, eager, _, expected = pair(mesh=mesh, parallel="ddp", placements=placements)
        for _ in range(2):
            given = batch()
            step(*given)
            expected(*given)
    finally:
        torch.distributed.destroy_process_group()
    assert model[0].weight.home.endswith("of devices (7, 6, 5, 4, 3, 2, 1, 0)")
    assert_equal(model, eager)


def test_the_report_says_where_everything_is():
    with record() as reports:
        _, _, step, *_ = pair(parallel="ddp", placements={"0.weight": [Replicate(), Shard(0)]})
        step(*batch())
    assert step.reports == reports
    report = reports[0].mesh
    assert report is not None
    assert report.mesh == "data=4, model=2"
    first, bias = report.parameters[:2]
    assert (first.name, first.value) == ("model.0.weight", "float64[16, 8]")
    assert (first.placement, first.bytes) == ("Shard(0) over model", 16 * 8 * 8 // 2)
    assert (bias.placement, bias.bytes) == ("Replicate", 16 * 8)
    assert sum(c.bytes for c in report.collectives if c.kind == "all-reduce") > 0
    assert report.argument_bytes > first.bytes
    assert reports[0].to_dict()["mesh"]["parameters"][0]["name"] == "model.0.weight"
    lines = str(report).splitlines()
    assert lines[0] == "on a mesh (data=4, model=2), for each device:"
    assert "  model.0.weight float64[16, 8]: Shard(0) over model, 512 B" in lines
    assert any(line.startswith("  all-reduce: ") for line in lines)


def test_tensors_that_share_memory_are_refused():
    model = net()
    whole = torch.randn(2, 8, dtype=torch.float64)
    model.register_buffer("first", whole[0])
    model.register_buffer("second", whole[1])
    optimizer = adamw(model)
    step = compile_step(
        trainer(model, optimizer), model=model, optimizer=optimizer, mesh={"data": 8}
    )
    with pytest.raises(StepCaptureError, match=r"model\.first and model\.second share storage"):
        step(*batch())


_MANY = """
import sys, torch
from dynamo_backends import compile_step
from tests.xla.trainers import of_squares
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))).double()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
train = of_squares(model, optimizer)
step = compile_step(
    train, model=model, optimizer=optimizer, mesh={"data": 8}, parallel="fsdp",
    options={"verify": "off"},
)
x = torch.randn(64, 512).double()
losses = [step(x) for _ in range(100)]
print(float(losses[-1]) < float(losses[0]))
"""


@pytest.mark.parametrize("threads", [None, "1"])
def test_a_hundred_steps_that_nobody_waits_for_do_not_starve_each_other(threads: str | None):
    """With as many threads as devices the third or so of them hangs (see `devices._threads`)."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if threads is not None:
        variables["PJRT_NPROC"] = threads
    done = subprocess.run(
        [sys.executable, "-c", _MANY],
        cwd=ROOT, env=variables, capture_output=True, text=True, timeout=170, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["True"]
    assert "waiting" not in done.stderr
