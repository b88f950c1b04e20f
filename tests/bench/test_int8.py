"""benchmarks/autotune.py --precision int8: what it measures, and when it is content."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import int8
from harness.int8 import Int8Row, Subject
from tests.bench.programs import load


def small(scale: str, batch: int) -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    return Subject("small", model, [(torch.rand(8, 32),) for _ in range(4)], (torch.rand(8, 32),))


@pytest.fixture
def only_small(monkeypatch: pytest.MonkeyPatch) -> None:
    subjects: dict[str, Callable[[str, int], Subject]] = {"small": small}
    monkeypatch.setattr(int8, "SUBJECTS", subjects)


@pytest.mark.usefixtures("only_small")
def test_a_model_is_measured_beside_eager_and_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    program, path = load("benchmarks/autotune.py"), tmp_path / "results.json"
    arguments = ["--precision", "int8", "--backend", "onnxrt", "--rounds", "2"]
    assert program.main([*arguments, "--json", str(path)]) in (0, 1)  # it may be no faster
    (row,) = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert row["error"] == ""
    assert row["cosine"] > 0.99
    assert list(row["float32"]) == ["onnxrt"]
    shown = capsys.readouterr().out
    assert "onnxrt@int8-dynamic" in shown
    assert "int8 over that" in shown


@pytest.mark.usefixtures("only_small")
def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]):
    arguments = ["--precision", "int8", "--models", "large"]
    assert load("benchmarks/autotune.py").main(arguments) == 2
    assert "there is no model large; there are small" in capsys.readouterr().out


def test_it_has_to_be_accurate_and_where_there_is_vnni_fast(monkeypatch: pytest.MonkeyPatch):
    row = Int8Row("x", 10.0, {"ov": 2.0}, ratio=2.7, cosine=0.995)
    slow = Int8Row("x", 10.0, {"ov": 2.0}, ratio=2.5, cosine=0.995)
    off = Int8Row("x", 10.0, {"ov": 2.0}, ratio=2.7, cosine=0.98)
    for saturates, passed in ((False, [True, False, False]), (True, [True, True, False])):
        monkeypatch.setattr(int8, "saturates", lambda saturates=saturates: saturates)
        assert [r.passed for r in (row, slow, off)] == passed
    assert not Int8Row("x", error="RuntimeError: no").passed
    assert Int8Row("x", float32={"ov": 0.5}).best == 1.0
