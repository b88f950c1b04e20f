"""The command `dynamo-backends explain`."""

import json
from pathlib import Path

import pytest

from dynamo_backends import OptionError
from dynamo_backends.cli import main
from dynamo_backends.cli.explain import parse_options

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        y = self.fc(x).sin() + 1
        if y.sum() > 0:
            return torch.softmax(y * 2, -1).cos() * 3
        return y

def make(batch):
    return Model(), torch.ones(batch, 3)

def whole():
    return nn.Linear(3, 3), torch.ones(2, 3)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return f"{path}:make"


def explained(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main(["explain", *args, "--json"]) == 0
    loaded: dict = json.loads(capsys.readouterr().out)
    return loaded


def test_a_report(model: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", model, "--backend", "eager"]) == 0
    out = capsys.readouterr().out
    assert "Model with eager: 2 graphs" in out
    assert "data-dependent branch in Model.forward" in out


def test_json_with_options_and_batch(model: str, capsys: pytest.CaptureFixture[str]):
    options = ("--option", "keep_in_eager=('softmax',)", "--option", "freezing=off")
    found = explained(capsys, model, "--batch", "7", *options, "--option", "min_block_size=1")
    first, second = (graph["reports"][0] for graph in found["graphs"])
    assert first["kind"] == "inference"
    assert first["compilations"][0]["shapes"] == ["x: float32[7, 3]"]
    assert {x["reason"] for x in first["inputs"]} == {"", 'the option freezing is "off"'}
    assert [f["op"] for f in second["fallbacks"]] == ["aten._softmax.default"]
    assert second["blocks"] == 2


def test_a_function_in_a_file_keeps_its_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("def make(batch):", "def make(batch=5):"))
    for given, batch in (((), 5), (("--batch", "3"), 3)):
        found = explained(capsys, f"{path}:make", *given)
        report = found["graphs"][0]["reports"][0]
        assert report["compilations"][0]["shapes"] == [f"x: float32[{batch}, 3]"]


def test_training(model: str, capsys: pytest.CaptureFixture[str]):
    (graph,) = explained(capsys, model.replace(":make", ":whole"), "--train")["graphs"]
    assert [report["kind"] for report in graph["reports"]] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["nothing"], "dynamo-backends explain: MODEL must be hf:NAME"),
        (["{model}", "--backend", "inducto"], "there is no backend 'inducto'. Did you mean"),
        (
            ["{model}", "--option", "freezin=off"],
            "has no option 'freezin'. Did you mean 'freezing'",
        ),
        (
            ["{model}", "--option", "freezing"],
            "--option must have the form NAME=VALUE, not 'freezing'",
        ),
        (["{model}", "--option", "device=cuda"], "device='cuda' was requested, but jax has no"),
    ],
)
def test_what_cannot_be_done(
    model: str, args: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["explain", *(a.format(model=model) for a in args)]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("batch", ["0", "two"])
def test_a_wrong_batch(batch: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "x:y", "--batch", batch])
    assert f"must be a positive integer, not '{batch}'" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "--help"])
    out = capsys.readouterr().out
    assert "dynamo-backends explain torchvision:resnet18" in out
    assert "path/to/file.py:factory" in out


def test_options_are_literals_or_words():
    given = ["verify=True", "min_block_size=4", "keep_in_eager=('softmax',)", "freezing=off"]
    assert parse_options(given) == {
        "verify": True,
        "min_block_size": 4,
        "keep_in_eager": ("softmax",),
        "freezing": "off",
    }
    with pytest.raises(OptionError, match="NAME=VALUE"):
        parse_options(["=3"])


TRAFFIC = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), torch.ones(2, 3)
"""


def test_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "net.py").write_text(TRAFFIC)
    calls = [[[n, 3]] for n in (2, 3, 4, 5, 3)]
    path = tmp_path / "calls.json"
    path.write_text(json.dumps({"model": f"{tmp_path}/net.py:make", "calls": calls}))
    found = explained(capsys, "--traffic", str(path), "--backend", "onnxrt")
    assert found["calls"] == 5
    served = [row for g in found["graphs"] for r in g["reports"] for row in r["served"]]
    assert [(row["by"], row["calls"]) for row in served] == [("ranged", 4)]
    assert main(["explain", "--traffic", str(path), "--backend", "onnxrt"]) == 0
    assert "ranged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[", "cannot be read as JSON"),
        ('{"calls": [3]}', "must have the form"),
        (
            '{"calls": [[[2, 3], [4]]]}',
            "gives a shape for 1, but the tensors of the model's example are",
        ),
        ('{"calls": [{"x": [2, 3, 1]}]}', "gives a shape for 'x'"),
        ('{"calls": [[[2, 3, 1]]]}', "with the same number of dimensions"),
    ],
)
def test_traffic_that_cannot_be_read(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "net.py").write_text(TRAFFIC)
    path = tmp_path / "calls.json"
    path.write_text(text)
    assert main(["explain", f"{tmp_path}/net.py:make", "--traffic", str(path)]) == 2
    assert error in capsys.readouterr().err
