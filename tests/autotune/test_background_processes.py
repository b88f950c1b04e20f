"""`mode="background"` in programs that fork, spawn, and are killed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_backends.workers.worker_process import child_environment
from tests.autotune.conftest import LONG_S

PROGRAM = """
    import json, os, sys, time
    import torch
    import dynamo_backends
    from dynamo_backends.autotune import tuning_thread
    from planted_backends import Slow

    def say(**words):
        print(json.dumps(words), flush=True)

    def served(*names):
        model = Slow()
        options = {"mode": "background", "candidates": names, "trial_timeout_s": 100}
        return model, torch.compile(model, backend="autotune", options=options)

    def is_right(model, run):
        x = torch.randn(40, 50)
        with torch.no_grad():
            return all(map(torch.allclose, run(x), model(x)))

    def until_tried():
        while not os.path.exists(os.environ["PLANTED_MARK"]):
            time.sleep(0.01)

    def child_of_the_tuner():
        process = tuning_thread._thread._process._child
        return process.pid if process is not None else 0
"""

FORKS = (
    PROGRAM
    + """
    model, run = served("waits")
    assert is_right(model, run)
    until_tried()
    child = os.fork()
    if not child:
        status = dynamo_backends.tuning_status()[0]
        ended = dynamo_backends.wait_for_tuning(5)
        say(right=is_right(model, run), ended=ended, child=str(status), own=child_of_the_tuner())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.unlink(os.environ["PLANTED_GATE"])
    ended = dynamo_backends.wait_for_tuning(60)
    say(right=is_right(model, run), ended=ended, parent=str(dynamo_backends.tuning_status()[0]))
    child = os.fork()
    if not child:
        say(right=is_right(model, run), later=str(dynamo_backends.tuning_status()[0]))
        os._exit(0)
    os.waitpid(child, 0)
"""
)

SPAWNS = (
    PROGRAM
    + """
    import multiprocessing

    def work(name):
        model, run = served(name)
        right = is_right(model, run)
        ended = dynamo_backends.wait_for_tuning(60)
        status = str(dynamo_backends.tuning_status()[0])
        say(right=right and is_right(model, run), ended=ended, spawned=status)

    if __name__ == "__main__":
        child = multiprocessing.get_context("spawn").Process(target=work, args=("good",))
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""
)

ENDS = (
    PROGRAM
    + """
    model, run = served("waits")
    assert is_right(model, run)
    until_tried()
    say(tuner=child_of_the_tuner())
    if sys.argv[1] == "kill":
        time.sleep(100)
"""
)


LOADS = (
    PROGRAM
    + """
    import signal, threading
    from dynamo_backends import _torch_private as private

    held, over = threading.Event(), threading.Event()

    def load():
        with private.without_captures():
            held.set()
            over.wait()

    thread = threading.Thread(target=load)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)
        result = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        say(result=result.tolist())
        os._exit(0)
    say(status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    over.set()
    thread.join()
"""
)


@pytest.fixture
def site(tmp_path: Path, planted_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables for a program that has the planted package, and a folder of its own for files."""
    (tmp_path / "gate").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.syspath_prepend(str(planted_folder))
    return {
        **child_environment(),
        "PLANTED_GATE": str(tmp_path / "gate"),
        "PLANTED_MARK": str(tmp_path / "mark"),
        "TMPDIR": str(tmp_path / "temporary"),
        "DYNAMO_BACKENDS_CACHE": str(tmp_path / "cache"),
    }


def run(site: dict[str, str], folder: Path, program: str, *args: str) -> subprocess.Popen[str]:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program))
    command = [sys.executable, str(file), *args]
    return subprocess.Popen(command, env=site, stdout=subprocess.PIPE, text=True)


def said(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def is_left(folder: Path) -> list[Path]:
    """Files that programs have left: copies of graphs, and what is temporary."""
    temporary = (p for p in (folder / "temporary").iterdir() if "torchinductor" not in p.name)
    return [*temporary, *(folder / "cache").glob("tuning")]


def test_a_forked_child_serves_what_it_has_and_nothing_is_left(
    site: dict[str, str], tmp_path: Path
):
    child, parent, later = said(run(site, tmp_path, FORKS))
    reason = "gave up (this process was forked from the process that tunes)"
    assert child == {"right": True, "ended": True, "child": reason, "own": 0}
    assert parent == {"right": True, "ended": True, "parent": "verified winner waits runs calls"}
    assert later == {"right": True, "later": "verified winner waits runs calls"}
    assert is_left(tmp_path) == []


@pytest.mark.long
def test_a_child_captures_that_is_forked_while_a_winner_is_loaded(
    site: dict[str, str], tmp_path: Path
):
    assert said(run(site, tmp_path, LOADS)) == [{"result": [2.0, 2.0]}, {"status": 0}]


@pytest.mark.long
def test_a_spawned_process_tunes_itself(site: dict[str, str], tmp_path: Path):
    (words,) = said(run(site, tmp_path, SPAWNS))
    assert words == {"right": True, "ended": True, "spawned": "verified winner good runs calls"}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and /dev/shm")
@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "end"])
def test_nothing_is_left_of_a_program_that_ends(how: str, site: dict[str, str], tmp_path: Path):
    shared = set(os.listdir("/dev/shm"))
    program = run(site, tmp_path, ENDS, how)
    assert program.stdout is not None
    pid = json.loads(program.stdout.readline())["tuner"]
    if how == "kill":
        assert is_alive(pid)
        os.kill(program.pid, signal.SIGKILL)
    assert program.wait(LONG_S) == (-signal.SIGKILL if how == "kill" else 0)
    program.stdout.close()
    end = time.monotonic() + LONG_S
    while is_alive(pid):
        assert time.monotonic() < end, "the tuner is an orphan"
        time.sleep(0.05)
    left = [p for p in (tmp_path / "temporary").iterdir() if "torchinductor" not in p.name]
    assert left == []
    assert set(os.listdir("/dev/shm")) <= shared
    if how == "end":
        assert not (tmp_path / "cache" / "tuning").exists()
    else:
        os.unlink(tmp_path / "gate")
        said(run(site, tmp_path, SPAWNS))
        assert not (tmp_path / "cache" / "tuning").exists(), "copies of a killed process are left"
