"""Files for other runtimes: ONNX with changing sizes, StableHLO for platforms that are not here."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import FallbackRefusedError, SaveError
from tests.package.conftest import LENGTHS, Small
from tests.package.test_package import expected, sized


def test_an_onnx_file_serves_a_range(model: Small, call: Any, tmp_path: Path):
    path, length = tmp_path / "m.onnx", torch.export.Dim("length", min=2, max=32)
    shapes = {"x": {1: length}, "mask": {1: length}}
    dynamo_backends.export(model, path, *call, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [x.name for x in session.get_inputs()] == ["x", "mask"]
    assert [y.name for y in session.get_outputs()] == ["states", "pooled_0"]
    for n in LENGTHS:
        (x,), kwargs = other = sized(call, n)
        states, pooled = session.run(None, {"x": x.numpy(), "mask": kwargs["mask"].numpy()})
        right = expected(model, other)
        np.testing.assert_allclose(states, right["states"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(pooled, right["pooled"][0], rtol=1e-4, atol=1e-5)


class Images(nn.Module):
    """Has inputs and outputs whose channels are last in memory, and one that is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.convolve(x).relu()
        return y, y.mean((2, 3), keepdim=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_dimensions_of_an_onnx_file_are_in_the_tensors_order(dynamic: bool, tmp_path: Path):
    path, model = tmp_path / "m.onnx", Images().eval()
    x = torch.rand(4, 3, 9, 10).contiguous(memory_format=torch.channels_last)
    shapes = ({0: torch.export.Dim("batch", min=2, max=9)},) if dynamic else None
    dynamo_backends.export(model, path, (x,), dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = torch.rand(7 if dynamic else 4, 3, 9, 10)
    results = session.run(None, {"x": given.numpy()})
    for result, right in zip(results, model(given), strict=True):
        np.testing.assert_allclose(result, right.detach(), rtol=1e-4, atol=1e-5)


def test_stablehlo_is_lowered_for_platforms_that_are_not_here(
    model: Small, call: Any, tmp_path: Path
):
    path = tmp_path / "m.stablehlo"
    dynamo_backends.export(model, path, *call)
    with zipfile.ZipFile(path) as file:
        manifest = json.loads(file.read("manifest.json"))
        programs = {p: file.read(f"{p}.mlir") for p in manifest["platforms"]}
    assert manifest["inputs"] == [
        {"name": "x", "dtype": "float32", "shape": [2, 4, 8]},
        {"name": "mask", "dtype": "bool", "shape": [2, 4]},
    ]
    assert [y["name"] for y in manifest["outputs"]] == ["states", "pooled_0"]
    assert list(programs) == ["cpu", "cuda", "tpu"]
    for program in programs.values():
        assert str(Path(__file__).parent).encode() not in program
        assert program.startswith(b"ML\xefR")  # MLIR bytecode
        assert b"StableHLO_v" in program  # of a version that later ones read


class Norms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x).abs()


class Same(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, (x * 2 + 1).relu()


@pytest.mark.parametrize(
    ("model", "name", "more", "text"),
    [
        (Same(), "m.onnx", {}, "a result is an argument of the model"),
        (Same(), "m.pt", {}, r"writes \.onnx and \.stablehlo files, not m\.pt"),
        (Same(), "m.stablehlo", {"dynamic_shapes": ({},)}, "supports static sizes only"),
        (
            Same(),
            "m.stablehlo",
            {"platforms": ["gpu"]},
            r"must be chosen from cpu, cuda, tpu, not \['gpu'\]",
        ),
    ],
)
def test_what_cannot_be_exported_says_why(
    model: nn.Module, name: str, more: Any, text: str, tmp_path: Path
):
    with pytest.raises(SaveError, match=text):
        dynamo_backends.export(model, tmp_path / name, (torch.rand(4, 4),), **more)
    assert not (tmp_path / name).exists()


def test_a_call_without_a_form_there_is_named(tmp_path: Path):
    with pytest.raises(FallbackRefusedError, match=r"cannot run aten\.linalg_eig"):
        dynamo_backends.export(Norms(), tmp_path / "m.onnx", (torch.rand(4, 4),))
