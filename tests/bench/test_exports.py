"""Models exported by hand, the device of a run, and files of earlier versions."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends import BackendUnavailableError, OptionError
from dynamo_backends.bench import environment, exports, saved_run
from dynamo_backends.bench.cells import Cell
from dynamo_backends.bench.suites.case import ModelCase
from dynamo_backends.bench.workload import ModelWorkload, results, timed
from dynamo_backends.cli import main
from tests.bench import planted
from tests.bench.made_up import passing, run_of


class Named(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return x + y, (x * 2, y.relu())


def work(model: nn.Module, inputs: dict[str, Tensor]) -> ModelWorkload:
    case = ModelCase("named", lambda: model, lambda: inputs, enliven=False)
    return ModelWorkload(case, "inference", torch.float32)


@pytest.mark.parametrize("name", list(exports.EXPORTS))
@pytest.mark.filterwarnings("ignore")  # of the exporters about themselves
def test_an_export_gives_what_the_model_gives(name: str):
    given = work(Named(), {"x": torch.randn(2, 3), "y": torch.randn(2, 3)})
    expected, run = results(given.eager(), 1), given.compiled(name)
    found = results(run, 2)
    torch.testing.assert_close(found, expected)
    assert timed(run) is not run, "the bare session alone is timed"


def test_what_cannot_be_exported_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(
        OptionError, match=r"'export:tensorflow' is not one of export:onnxruntime, export:openvino"
    ):
        exports.require("export:tensorflow")
    flags = ["bench", f"{planted.__file__}:models", "--backends", "export:onnxruntime"]
    assert main([*flags, "--mode", "training"]) == 2
    assert "supports inference" in capsys.readouterr().err
    monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"run: pip install"):
        exports.require("export:openvino")


def test_a_gpu_that_is_not_there_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", f"{planted.__file__}:models", "--device", "cuda"]) == 2
    assert "--device cuda needs a GPU" in capsys.readouterr().err
    environment.require_torch_device("cpu")
    assert environment.synchronize_function("cpu") is None
    assert environment.peak_memory_bytes("cpu") > 1 << 20


def test_files_from_before_devices_are_of_the_cpu(tmp_path: Path):
    file = tmp_path / "run.json"
    saved_run.save(run_of({("a", "x"): passing(2.0)}), file)
    assert "device" not in json.loads(file.read_text())["context"]
    found = saved_run.read(file)
    assert found.context["device"] == "cpu"
    assert list(found.outcomes) == [Cell("a", "x")]
