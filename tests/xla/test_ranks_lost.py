"""What becomes of a step of several processes if one of them ends, stands still or is slow."""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.xla.ranks import Job, job

_TRAINING = """
import sys, time, torch
import torch.distributed as dist
import torch.nn.functional as F
from dynamo_backends import compile_step
from dynamo_backends.runtime import rank_monitor

rank_watch.DOUBT = 3
if len(sys.argv) > 2:
    rank_watch.SILENCE = float(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def train(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

step = compile_step(train, model=model, optimizer=optimizer, mesh={"data": dist.get_world_size()})
x, y = torch.randn(4, 8), torch.randint(4, (4,))
mode = sys.argv[1]
for number in range(10**9):
    loss = step(x, y)
    if mode != "unread":
        loss = float(loss)
    if number == 3:
        print("trains", flush=True)
        if mode.startswith("slow"):
            time.sleep(float(mode[4:]) if rank else 0)
        if mode == "raises" and rank:
            raise ValueError("a mistake")
        if mode == "fewer" and rank:
            break
        if mode == "rates" and rank:
            optimizer.param_groups[0]["lr"] = 0.02
    if mode.startswith("slow") and number == 6:
        print("goes on", flush=True)
        break
    time.sleep(0.005)
"""


def running(folder: Path, *arguments: str) -> Job:
    return job(_TRAINING, folder, arguments=arguments)


def survivor_says(
    started: Job, lost: int, number: signal.Signals, delay: float = 0.2
) -> tuple[str, float]:
    """What the other rank raises once one gets a signal, and after how many seconds it ends."""
    for rank in (0, 1):
        started.wait_for(rank, "trains")
    time.sleep(delay)
    started.processes[lost].send_signal(number)
    start = time.monotonic()
    assert started.wait(1 - lost) == 1, started.output(1 - lost)
    return started.output(1 - lost), time.monotonic() - start


@pytest.mark.parametrize("mode", ["read", "unread"])
@pytest.mark.parametrize("lost", [1, 0])
def test_a_killed_rank_is_named(lost: int, mode: str, tmp_path: Path):
    with running(tmp_path, mode) as started:
        said, seconds = survivor_says(started, lost, signal.SIGKILL)
    assert f"RankError: rank {lost}" in said
    assert "restart from the last checkpoint" in said
    assert seconds < 60


@pytest.mark.long
@pytest.mark.parametrize("mode", ["read", "unread"])
@pytest.mark.parametrize("lost", [1, 0])
@pytest.mark.parametrize("silence", ["5", "30"])
def test_a_suspended_rank_is_named(silence: str, lost: int, mode: str, tmp_path: Path):
    with running(tmp_path, mode, *([silence] if silence != "30" else [])) as started:
        said, seconds = survivor_says(started, lost, signal.SIGSTOP)
    assert f"RankError: rank {lost}" in said
    assert seconds < 60


@pytest.mark.long
@pytest.mark.parametrize("seconds", ["8", "70"])
def test_a_slow_rank_is_waited_for(seconds: str, tmp_path: Path):
    silence = ["5"] if seconds == "8" else []
    with running(tmp_path, f"slow{seconds}", *silence) as started:
        assert all("goes on" in said for said in started.finish())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["raises", "fewer"])
def test_a_rank_that_ends_before_the_others_is_named(mode: str, tmp_path: Path):
    with running(tmp_path, mode) as started:
        assert started.wait(1) == (mode == "raises")
        assert started.wait(0) == 1
        said = started.output(0)
    assert "RankError: rank 1" in said
    assert "exited" in said


@pytest.mark.long
def test_learning_rates_that_differ_are_told_apart(tmp_path: Path):
    with running(tmp_path, "rates") as started:
        for rank in (0, 1):
            assert started.wait(rank) == 1
            said = started.output(rank)
            assert "RankError: ranks run different operations at the same point" in said
            assert "numbers [0.01, 0, 0, 0" in said
            assert "numbers [0.02, 0, 0, 0" in said


@pytest.mark.long
def test_nothing_hangs_in_a_hundred_jobs(tmp_path: Path):
    for number in range(100):
        drawn = random.Random(number)
        lost, mode = drawn.randrange(2), drawn.choice(["read", "unread"])
        sent = drawn.choice([signal.SIGKILL, signal.SIGSTOP])
        folder = tmp_path / str(number)
        folder.mkdir()
        with running(folder, mode, "5") as started:
            said, seconds = survivor_says(started, lost, sent, drawn.random())
        assert f"RankError: rank {lost}" in said, number
        assert seconds < 60, number
