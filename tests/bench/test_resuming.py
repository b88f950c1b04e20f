"""Runs that are interrupted and go on: the same results, and nothing is measured twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_backends.bench import runs
from dynamo_backends.bench.cells import BenchConfig, Cell, Outcome, Speedup
from dynamo_backends.cli import main
from dynamo_backends.workers.worker_process import child_environment
from tests.bench import planted

FILE = planted.__file__


def arguments(file: Path, *more: str) -> list[str]:
    backends = [f"{FILE}:broken", f"{FILE}:right"]
    return ["bench", f"{FILE}:models", "--backends", *backends, "--rounds", "5",
            "--output", str(file), *more]  # fmt: skip


class Measuring:
    """In place of processes; it is interrupted before one of the cells."""

    def __init__(self, stops_at: int | None = None):
        self.measured: list[Cell] = []
        self.stops_at = stops_at

    def __call__(self, cell: Cell, how: BenchConfig) -> Outcome:
        if len(self.measured) == self.stops_at:
            raise KeyboardInterrupt
        self.measured.append(cell)
        seed = float(len(cell.model) + len(cell.backend))
        rounds = (seed, seed + 1)
        return Outcome("pass", eager_s=rounds, backend_s=rounds, seconds=seed,
                       speedup=Speedup(1.0, 0.9, 1.1, 1.0))  # fmt: skip


@pytest.mark.parametrize("stops_at", [0, 1, 3])
def test_an_interrupted_run_goes_on_with_what_is_left(
    stops_at: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    monkeypatch.setattr(runs, "measure", Measuring())
    assert main(arguments(whole)) == 0
    capsys.readouterr()
    first, second = Measuring(stops_at), Measuring()
    monkeypatch.setattr(runs, "measure", first)
    assert main(arguments(parts)) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert f"has {stops_at} of 4 results" in said
    assert ("saved" in said) == parts.with_suffix(".html").exists() == (stops_at > 0)
    monkeypatch.setattr(runs, "measure", second)
    assert main(arguments(parts, "--resume")) == 0
    assert len(first.measured) == stops_at
    assert len({*first.measured, *second.measured}) == 4 == stops_at + len(second.measured)
    assert json.loads(parts.read_text())["results"] == json.loads(whole.read_text())["results"]
    assert "cells are measured" not in parts.with_suffix(".html").read_text(encoding="utf-8")


def test_more_can_be_asked_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "run.json"
    first, second = Measuring(), Measuring()
    monkeypatch.setattr(runs, "measure", first)
    assert main(arguments(file, "--models", "conv")) == 0
    monkeypatch.setattr(runs, "measure", second)
    modes = ["--mode", "inference", "training"]
    assert main(arguments(file, "--resume", "--models", "conv", "dense", *modes)) == 0
    assert len(first.measured) == 2
    assert len(second.measured) == 6
    assert not set(first.measured) & set(second.measured)


BROKEN, RIGHT = f"{FILE}:broken", f"{FILE}:right"


@pytest.mark.parametrize(
    ("named", "asked", "expected"),
    [
        ([], 4, [("dense", RIGHT), ("conv", BROKEN), ("conv", RIGHT)]),
        (["--models", "conv"], 2, [("conv", BROKEN), ("conv", RIGHT)]),
        (["--backends", RIGHT], 2, [("dense", RIGHT), ("conv", RIGHT)]),
        (["--models", "dense", "--backends", BROKEN], 1, []),
        (["--backends", "eager"], 2, [("dense", "eager"), ("conv", "eager")]),
    ],
)
def test_a_resumed_run_measures_what_is_asked_for(
    named: list[str],
    asked: int,
    expected: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    file = tmp_path / "run.json"
    monkeypatch.setattr(runs, "measure", Measuring(1))
    assert main(arguments(file)) == 130
    second, third = Measuring(), Measuring()
    monkeypatch.setattr(runs, "measure", second)
    resumed = ["bench", f"{FILE}:models", "--rounds", "5", "--output", str(file), "--resume"]
    capsys.readouterr()
    assert main([*resumed, *named]) == 0
    assert [(c.model, c.backend) for c in second.measured] == expected
    assert not expected or f"[{asked}/{asked}] " in capsys.readouterr().out
    monkeypatch.setattr(runs, "measure", third)
    assert main(resumed) == 0
    assert len({*second.measured, *third.measured}) == len(second.measured) + len(third.measured)
    assert "cells are measured" not in file.with_suffix(".html").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_killed_run_is_resumed(tmp_path: Path):
    """SIGKILL: nothing is told, and the process that measured ends of itself."""
    file = tmp_path / "run.json"
    command = [sys.executable, "-m", "dynamo_backends.cli", *arguments(file, "--models", "dense")]
    run = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL)
    try:
        while not results(file) and run.poll() is None:
            time.sleep(0.02)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    before = results(file)
    assert len(before) == 1
    done = subprocess.run(
        [*command, "--resume"], env=child_environment(), capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    after = results(file)
    assert after[:1] == before, "measured twice"
    found = [(x["cell"]["model"], x["cell"]["backend"].rpartition(":")[2], x["status"])
             for x in after]  # fmt: skip
    assert found == [("dense", "broken", "fail_to_run"), ("dense", "right", "pass")]


def results(file: Path) -> list[Any]:
    found: list[Any] = json.loads(file.read_text())["results"] if file.exists() else []
    return found


def test_a_terminated_run_takes_its_processes_along(tmp_path: Path):
    file, pid = tmp_path / "run.json", tmp_path / "pid"
    backend = tmp_path / "backend.py"
    backend.write_text(
        "import os, pathlib, time\n"
        f"def waits(captured, inputs):\n    path = pathlib.Path({str(pid)!r})\n"
        "    path.with_suffix('.new').write_text(str(os.getpid()))\n"
        "    path.with_suffix('.new').rename(path)\n    time.sleep(3600)\n"
    )
    command = [sys.executable, "-m", "dynamo_backends.cli", *arguments(file)]
    command += ["--backends", f"{backend}:waits"]
    run = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL)
    try:
        while not pid.exists() and run.poll() is None:
            time.sleep(0.02)
    finally:
        run.terminate()
        status = run.wait()
    assert status == 143
    assert results(file) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "exists. Pass --resume to continue this run, or --output to write another file."),
        (
            ["--resume", "--rounds", "7"],
            "were measured under other conditions: rounds is 7",
        ),
    ],
)
def test_results_of_another_kind_are_left_alone(
    more: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    file = tmp_path / "run.json"
    monkeypatch.setattr(runs, "measure", Measuring())
    assert main(arguments(file)) == 0
    before = file.read_bytes()
    assert main(arguments(file, *more)) == 2
    assert message in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_file_that_is_no_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "other.json"
    file.write_text('{"kind": "something"}')
    assert main(["bench", "page", str(file)]) == 2
    assert "other.json is not a result of `dynamo-backends bench`" in capsys.readouterr().err


def test_time_left_is_that_of_cells_like_those_before():
    assert [runs.format_duration(s) for s in (float("nan"), 41, 300, 5000)] == [
        "unknown time",
        "41 s",
        "5 min",
        "1 h 23 min",
    ]
