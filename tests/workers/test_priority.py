"""How another process is kept from taking a processor from this one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_backends.workers import worker_process

LINUX = sys.platform == "linux"


@pytest.fixture
def sleeping() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


def has_custom_slices() -> bool:
    release = Path("/proc/sys/kernel/osrelease").read_text() if LINUX else "0.0"
    return tuple(int(n) for n in release.split(".")[:2]) >= (6, 12)


def test_the_niceness_comes_on_top(sleeping: int):
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    worker_process.lower_priority(sleeping, 3)
    assert os.getpriority(os.PRIO_PROCESS, sleeping) == min(mine + 3, 19)


@pytest.mark.skipif(not has_custom_slices(), reason="Linux before 6.12 has no slices to choose")
def test_it_gets_the_longest_slice(sleeping: int):
    before = worker_process.slice_ns(sleeping)
    worker_process.lower_priority(sleeping, 3)
    assert worker_process.slice_ns(sleeping) > before
    assert worker_process.slice_ns(os.getpid()) == before


def test_a_process_that_is_gone_is_left_alone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    mine = os.getpriority(os.PRIO_PROCESS, 0), worker_process.slice_ns(os.getpid())
    worker_process.lower_priority(process.pid, 3)
    assert (os.getpriority(os.PRIO_PROCESS, 0), worker_process.slice_ns(os.getpid())) == mine


def test_an_unknown_machine_gets_the_niceness_alone(sleeping: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    worker_process.lower_priority(sleeping, 3)
    assert os.getpriority(os.PRIO_PROCESS, sleeping) > os.getpriority(os.PRIO_PROCESS, 0)
    assert worker_process.slice_ns(sleeping) == 0
