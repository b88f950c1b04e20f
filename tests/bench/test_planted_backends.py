"""What backends do wrong, each in processes of its own: shown as it is, and no run stops."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_backends.bench.cells import BenchConfig, Cell, Outcome
from dynamo_backends.bench.processes import measure
from dynamo_backends.cli import main
from tests.bench import planted

FILE = planted.__file__
HOW = BenchConfig(f"{FILE}:models", rounds=5)


def outcome(backend: str, how: BenchConfig = HOW, model: str = "dense", **more: Any) -> Outcome:
    return measure(Cell(model, f"{FILE}:{backend}", **more), how)


def test_a_run_goes_through_and_says_what_each_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "run.json"
    names = ("wrong", "slow", "crashing")
    backends = [f"{FILE}:{name}" for name in names]
    status = main(
        ["bench", f"{FILE}:models", "--models", "dense", "--rounds", "6", "--backends", *backends,
         "--output", str(file)]
    )  # fmt: skip
    assert status == 1, "backends failed"
    found = {
        Path(x["cell"]["backend"]).name.removeprefix("planted.py:"): x
        for x in json.loads(file.read_text())["results"]
    }
    assert {name: x["status"] for name, x in found.items()} == {
        "wrong": "fail_accuracy",
        "slow": "pass",
        "crashing": "fail_to_run",
    }
    assert found["wrong"]["reason"].startswith("output 0 differs from eager by up to")
    assert "the process died of SIGABRT while it was compiled" in found["crashing"]["reason"]
    slow = found["slow"]
    assert slow["speedup"]["high"] < 1
    assert slow["speedup"]["p"] < 0.05
    assert len(slow["eager_s"]) == len(slow["backend_s"]) == 6
    assert min(slow["backend_s"]) > 0.005
    assert slow["graphs"] == 1
    assert slow["compile_cold_s"] > 0.005
    assert slow["compile_warm_s"] > 0.005
    assert slow["peak_eager"] > 1 << 20
    assert slow["peak_backend"] > 1 << 20
    assert (slow["ops_outside"], slow["breaks"]) == (0, 0)
    said = " ".join(capsys.readouterr().out.split())
    assert "[3/3] dense planted.py:crashing inference float32: fail_to_run" in said
    page = file.with_suffix(".html").read_text(encoding="utf-8")
    assert "the process died of SIGABRT" in page


@pytest.mark.parametrize("backend", ["ts_trace", pytest.param("inductor", marks=pytest.mark.long)])
def test_what_is_not_compiled_has_no_speedup(backend: str):
    found = measure(Cell("recurrent", backend), replace(HOW, suite=f"{FILE}:skipped"))
    assert (found.status, found.speedup, found.backend_s) == ("not_compiled", None, ())
    assert not found.passed
    assert not found.eager_failed
    assert ("allow_rnn" if backend == "ts_trace" else "captured no graph") in found.reason


@pytest.mark.long
def test_an_error_is_the_reason():
    found = outcome("broken")
    assert (found.status, found.reason) == ("fail_to_run", "RuntimeError: no licence")


@pytest.mark.long
def test_what_does_not_end_is_a_timeout():
    found = outcome("hanging", BenchConfig(f"{FILE}:models", timeout_s=12))
    assert found.status == "timeout"
    assert found.reason.startswith("did not finish within 12 s,")


def test_whether_results_are_right_is_said_without_times():
    how = replace(HOW, accuracy=True)
    found = outcome("slow", how)
    assert (found.status, found.stage, found.graphs) == ("pass", "done", 1)
    assert (found.eager_s, found.speedup, found.compile_warm_s) == ((), None, None)
    assert outcome("wrong", how).status == "fail_accuracy"


@pytest.mark.parametrize(
    ("backend", "memory_gb", "reason"),
    [
        ("greedy", None, "MemoryError: not enough memory: you tried to allocate 1 PB"),
        ("hoarding", 1.5, "of 1.5 allowed, while it was compiled and called for the first time"),
    ],
)
def test_too_much_memory(backend: str, memory_gb: float | None, reason: str):
    found = outcome(backend, BenchConfig(f"{FILE}:models", memory_gb=memory_gb))
    assert found.status == "OOM"
    assert reason in found.reason
    assert not found.eager_failed


@pytest.mark.long
def test_what_eager_cannot_do_is_no_failure_of_the_backend():
    how = BenchConfig(f"{FILE}:unfit", rounds=5)
    two_runs = outcome("right", how, "counting")
    assert two_runs.status == "eager_two_runs_differ"
    assert two_runs.reason.startswith("output 0 differs")
    build = outcome("right", how, "unbuildable")
    assert build.status == "eager_fail_to_run"
    assert "cannot make a model: ValueError: no such checkpoint" in build.reason
    assert two_runs.eager_failed
    assert build.eager_failed


@pytest.mark.long
@pytest.mark.parametrize("mode", ["training", "step"])
def test_training_and_steps_are_compared_too(mode: Any):
    good, bad = (outcome(name, mode=mode, batch=3) for name in ("right", "wrong"))
    assert (good.status, good.reason) == ("pass", "")
    assert good.max_rel == 0
    assert len(good.backend_s) == 5
    assert bad.status == "fail_accuracy"
