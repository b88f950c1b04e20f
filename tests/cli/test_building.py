"""The commands `compile`, `tune` and `save`."""

import re
from pathlib import Path

import pytest
import torch

import dynamo_backends
from dynamo_backends.autotune.decisions import DecisionStore
from dynamo_backends.cli.main import main

MODEL = """
import torch
from torch import nn

def make(batch=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.rand(batch, 8)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return f"{path}:make"


def test_what_was_compiled_before_is_on_disk(model: str, capsys: pytest.CaptureFixture[str]):
    for compiled, loaded in ((1, 0), (0, 1)):
        torch.compiler.reset()
        assert main(["compile", model, "--backend", "onnxrt"]) == 0
        expected = f"executables: {compiled} compiled, {loaded} from the disk cache"
        assert expected in capsys.readouterr().out


def test_tuning_keeps_a_decision_and_says_why(model: str, capsys: pytest.CaptureFixture[str]):
    assert main(["tune", model, "--option", "candidates=['ts_trace']", "--batch", "2"]) == 0
    said = capsys.readouterr().out
    (decision,) = DecisionStore().all()
    assert decision.inputs == ("float32[2, 8]",)
    assert re.search(rf"inference graph \d+: {decision.winner}$", said, re.MULTILINE)
    assert {line.split()[0] for line in said.splitlines()} >= {"candidate", "ts_trace", "eager"}
    assert "tuning took: capture" in said
    assert max(map(len, said.splitlines()[:-1])) <= 80


def test_a_saved_model_is_loaded(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "m.dbp"
    assert main(["save", model, "--backend", "onnxrt", "--output", str(path)]) == 0
    assert f"saved {path}, 0.0 MB" in capsys.readouterr().out
    loaded = dynamo_backends.load(path, strict=True)
    assert loaded.calls == "input: float32[3, 8]"
    assert loaded(torch.rand(3, 8)).shape == (3, 4)
