"""Training steps of two processes equal those of one with the whole batch."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dynamo_backends import compile_step
from dynamo_backends.xla.mesh.gloo_connections import own_address
from tests.xla.ranks import LIMIT, ROOT, job

_SHARED = """
import os, sys, torch
import torch.nn.functional as F
from torch import nn

def net():
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)
    ).double()

def trainer(model, optimizer):
    def train(x, y):
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, scores
    return train

def batch(number):
    drawn = torch.Generator().manual_seed(number)
    x = torch.randn(16, 8, generator=drawn, dtype=torch.float64)
    return x, torch.randint(4, (16,), generator=drawn)
"""

_TRAINING = (
    _SHARED
    + """
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dynamo_backends import compile_step

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for kind in sys.argv[1:]:
    torch.manual_seed(rank)  # the parameters are rank 0's
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = compile_step(
        trainer(model, optimizer), model=model, optimizer=optimizer, mesh={"data": size},
        parallel=kind, python="replay",
    )
    torch.manual_seed(50 + rank)  # and so are random numbers
    each = 16 // size
    losses = []
    for number in range(20):
        loss, scores = step(*(t[rank * each : (rank + 1) * each] for t in batch(number)))
        losses.append(float(loss))
    assert scores.shape == (16, 4) and torch.isfinite(scores).all()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=f"{kind}.parts")
    whole = {name: p.detach().clone() for name, p in model.state_dict().items()}
    torch.save((losses, whole), f"{kind}{rank}.pt")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    dcp.load(state, checkpoint_id=f"{kind}.parts")
    assert all(torch.equal(p, whole[name]) for name, p in model.state_dict().items())
    step(*(t[:each] for t in batch(0)))
    assert step.compilations == 1
    for found in step.reports[0].mesh.collectives:
        print(f"{kind}: {found.kind} {found.count} times", flush=True)
threads = map(int, os.listdir("/proc/self/task") if hasattr(os, "SCHED_BATCH") else ())
policies = list(map(os.sched_getscheduler, threads))
print(f"threads of batches: {policies.count(os.SCHED_BATCH) if policies else 1}", flush=True)
"""
)

helpers: dict[str, Any] = {}
exec(_SHARED, helpers)


def eager_training() -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = helpers["net"]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(50)
    train = helpers["trainer"](model, optimizer)
    return [train(*helpers["batch"](number))[0].item() for number in range(20)], model


KINDS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What two processes left in a folder (losses, parameters, checkpoints), and what they said.

    They train in both ways, then give arguments that are refused, then programs that differ.
    """
    folder = tmp_path_factory.mktemp("ranks")
    with job(_TRAINING + _ARGUMENTS + _DIFFERENT, folder, arguments=KINDS) as started:
        return folder, started.finish()


@pytest.fixture(scope="module")
def trained(done: tuple[Path, list[str]]) -> Path:
    return done[0]


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_one_process_and_replicas_stay_equal(kind: str, trained: Path):
    losses, first = torch.load(trained / f"{kind}0.pt")
    others, second = torch.load(trained / f"{kind}1.pt")
    assert losses == others
    assert all(torch.equal(first[name], second[name]) for name in first)
    expected, model = eager_training()
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_read_in_eager_and_on_devices_of_one_process(kind: str, trained: Path):
    _, expected = torch.load(trained / f"{kind}0.pt")
    eager, model = helpers["net"](), helpers["net"]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train = helpers["trainer"](model, optimizer)
    step = compile_step(train, model=model, optimizer=optimizer, mesh={"data": 4}, parallel="fsdp")
    step(*helpers["batch"](0))
    for each in (eager, model):
        state = {"model": each.state_dict()}
        if each is model:
            state["optimizer"] = optimizer.state_dict()
        with pytest.warns(UserWarning, match="the intent is to load in a single process"):
            dcp.load(state, checkpoint_id=trained / f"{kind}.parts")
        for name, value in each.state_dict().items():
            assert torch.equal(value, expected[name])
    state = optimizer.state_dict()["state"]
    assert all(int(entry["step"]) == 20 for entry in state.values())
    step(*helpers["batch"](1))
    assert step.compilations == 1


_ARGUMENTS = """
from torch.distributed.device_mesh import init_device_mesh
from dynamo_backends import OptionError, StepCaptureError
from tests.xla.trainers import of_squares

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())

train = of_squares(model, optimizer)
for mesh, device in (({"data": 4}, "cpu"), ({"data": 2}, "tpu")):
    try:
        compile_step(
            train, model=model, optimizer=optimizer, mesh=mesh, options={"device": device}
        )
    except OptionError as error:
        print(f"refused: {error}", flush=True)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
step = compile_step(
    train, model=model, optimizer=optimizer, mesh=mesh, parallel="fsdp", python="replay"
)
try:
    step(torch.randn(4, 8, requires_grad=True))
except StepCaptureError as error:
    print(f"refused: {error}", flush=True)
before = model.weight.sum().item()
step(torch.randn(4, 8))
print(f"home: {model.weight.home}, {step.reports[0].mesh.parameters[0].placement}", flush=True)

seen = []

def reads(x):
    scores = model(x)
    loss = scores.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.append((tuple(x.shape), round(loss.item(), 6)))
    if len(seen) in {3}:
        seen.append("three")
    return x, scores.sum(1)

step = compile_step(
    reads, model=model, optimizer=optimizer, mesh=mesh, parallel="fsdp", python="replay"
)
for _ in range(4):
    whole, sums = step(torch.full((4, 8), 1.0 + rank))
    assert whole[:, 0].tolist() == [1.0] * 4 + [2.0] * 4, whole.tolist()
    assert sums.shape == (8,)
assert seen[3] == "three" and [s[0] for s in seen if s != "three"] == [(8, 8)] * 4
assert seen[0][1] > seen[1][1] > seen[2][1] > seen[4][1], seen
assert (step.eager_steps, step.refusals, step.cuts) == (0, {}, 1)
print(f"python: {seen[0][1]}", flush=True)
"""

_DIFFERENT = """
from dynamo_backends import RankError

def attempt(name, hidden, size, activation, sizes=()):
    last = torch.nn.Linear(hidden, 4)
    model = torch.nn.Sequential(torch.nn.Linear(8, hidden), activation(), last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    train = of_squares(model, optimizer)
    step = compile_step(
        train, model=model, optimizer=optimizer, mesh={"data": 2}, python="replay"
    )
    try:
        for size in (*sizes, size):
            float(step(torch.randn(size, 8)))
    except RankError as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: no error", flush=True)

attempt("models", 16 + rank, 4, torch.nn.ReLU)
attempt("functions", 16, 4, torch.nn.GELU if rank else torch.nn.ReLU)
attempt("batches", 16, 4 + rank, torch.nn.ReLU)
attempt("equal", 16, 4, torch.nn.ReLU)
attempt("choices", 16, 4 + rank, torch.nn.ReLU, (4, 5, 4))
"""


@pytest.fixture(scope="module")
def said_by_ranks(done: tuple[Path, list[str]]) -> list[str]:
    return done[1]


def test_no_gradient_is_kept_until_all_are_there(said_by_ranks: list[str]):
    for said in said_by_ranks:
        found = re.search(r"^ddp: all-reduce (\d+) times", said, re.MULTILINE)
        assert found is not None
        assert int(found[1]) >= len(list(helpers["net"]().parameters()))


def test_the_thread_that_receives_does_not_interrupt_the_one_that_computes(
    said_by_ranks: list[str],
):
    for said in said_by_ranks:
        assert "threads of batches: " in said
        assert "threads of batches: 0" not in said


def test_arguments_with_several_processes(said_by_ranks: list[str]):
    for said in said_by_ranks:
        refused = [line for line in said.splitlines() if line.startswith("refused: ")]
        assert len(refused) == 3, said
        assert "mesh (data=4) has 4 devices, but torch.distributed has 2" in refused[0]
        assert "on CPUs only, not on tpu" in refused[1]
        assert "a tensor of the batch requires a gradient" in refused[2]
        assert "home: cpu mesh (all=2) of 2 processes, Shard(0) over all" in said


def test_python_of_all_ranks_sees_the_whole_batch_and_the_same_values(said_by_ranks: list[str]):
    losses = {re.search(r"^python: (.*)$", said, re.MULTILINE)[1] for said in said_by_ranks}
    assert len(losses) == 1


def test_ranks_with_different_programs_all_say_so_before_they_talk(said_by_ranks: list[str]):
    for said in said_by_ranks:
        lines = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
        start = "the ranks have different programs: "
        assert lines["models"].startswith(
            f"{start}rank 0 has model.0.weight of torch.float32[16, 8], "
            "but rank 1 has model.0.weight of torch.float32[17, 8]. Build"
        )
        assert f"{start}rank 0 calls aten.relu" in lines["functions"]
        assert "but rank 1 calls aten.gelu" in lines["functions"]
        assert lines["batches"].startswith(
            f"{start}rank 0 has a tensor of the whole batch of float32[8, 8], "
            "but rank 1 has a tensor of the whole batch of float32[10, 8]."
        )
        assert lines["equal"] == "no error"
        choice = r"rank 0 runs program (\d), but rank 1 runs program (\d) of the compiled ones"
        numbers = re.search(choice, lines["choices"])
        assert numbers is not None
        assert int(numbers[2]) == int(numbers[1]) + 1
        assert "Give all ranks batches of the same shapes" in lines["choices"]


_TENSOR_PARALLEL = (
    _SHARED
    + """
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from dynamo_backends import RankError, compile_step

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
step = compile_step(
    trainer(model, optimizer), model=model, optimizer=optimizer, mesh={"data": 2, "model": 2},
    placements={
        "0.*": [Replicate(), Shard(0)], "1.*": [Replicate(), Shard(0)],
        "4.weight": [Replicate(), Shard(1)],
    },
)
half = rank // 2
try:
    step(*(t[8 * half : 8 * half + 8] + (rank == 3) for t in batch(0)))
except RankError as error:
    print(f"refused: {error}", flush=True)
torch.manual_seed(50)
losses = []
for number in range(20):
    loss, _ = step(*(t[8 * half : 8 * half + 8] for t in batch(number)))
    losses.append(float(loss))
torch.save((losses, {k: v.clone() for k, v in model.state_dict().items()}), f"{rank}.pt")
"""
)


@pytest.mark.long
def test_tensor_parallel_steps_of_four_processes(tmp_path: Path):
    with job(_TENSOR_PARALLEL, tmp_path, size=4) as started:
        for said in started.finish():
            assert "refused: rank 2 and rank 3 have different values in a batch tensor" in said
    expected, model = eager_training()
    for rank in range(4):
        losses, parameters = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_the_example_trains_under_torchrun(tmp_path: Path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", ROOT / "examples" / "train_ddp.py"),
            *("--parallel", "fsdp", "--checkpoint", tmp_path / "points"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(9\d|100)\.\d% of 2048 points", done.stdout)
    assert (tmp_path / "points" / ".metadata").exists()


def test_a_process_knows_its_address_on_the_way_to_another():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no such name") == "127.0.0.1"
