"""`dynamo-backends inspect` and `verify`."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.cli.main import main


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("cli") / "m.dbp"
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    length = torch.export.Dim("batch", min=2, max=8)
    options = {
        "keep_in_eager": ("aten.gelu",),
        "min_block_size": 1,
        "session_config": {"session.qdq": "0" * 60},
    }
    dynamo_backends.save(
        model, made, (torch.rand(4, 8),), dynamic_shapes=({0: length},), backend="onnxrt",
        options=options,
    )  # fmt: skip
    return made


def test_inspect_shows_what_is_in_it_in_80_columns(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^model +Sequential$", text, re.MULTILINE)
    assert re.search(r"^called with +input: float32\[s\d+, 8\]$", text, re.MULTILINE)
    assert re.search(r"^backend +onnxrt$", text, re.MULTILINE)
    assert re.search(r"^executables +2, [\d.]+ KiB$", text, re.MULTILINE)
    assert re.search(r"^weights +6 tensors", text, re.MULTILINE)
    assert f"torch {torch.__version__}" in text


def test_inspect_as_json_is_the_manifest(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(path), "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["backend"] == "onnxrt"
    assert manifest["parts"]["graph.json"]["sha256"]


def test_verify_compares_a_run(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", str(path), "--strict"]) == 0
    text = capsys.readouterr().out
    assert "executables: 2 from the file, 0 compiled here" in text
    assert "as accurate as" in text


def test_verify_says_what_differs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.package.module import PackagedModule

    right = PackagedModule.forward
    monkeypatch.setattr(PackagedModule, "forward", lambda self, *x: right(self, *x) + 1)
    assert main(["verify", str(path)]) == 1
    assert "results differ from those of the portable graph: output 0" in capsys.readouterr().out


def test_a_damaged_file_is_an_error(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    damaged = tmp_path / "m.dbp"
    damaged.write_bytes(path.read_bytes()[:-100])
    for command in ("inspect", "verify"):
        assert main([command, str(damaged)]) == 2
        assert "is damaged or not a package" in capsys.readouterr().err
