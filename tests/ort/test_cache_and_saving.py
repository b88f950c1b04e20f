"""Models on disk: those of the cache, and those that users save."""

import gc
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends import CompileError, GraphReport, ort


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


def run(model: nn.Module, x: torch.Tensor, **options: object) -> tuple[torch.Tensor, GraphReport]:
    torch._dynamo.reset()
    with torch.no_grad(), dynamo_backends.record() as reports:
        result = torch.compile(model, backend="onnxrt", options=options or None)(x)
    return result, reports[0]


def test_a_second_process_would_find_the_model():
    model, x = net(), torch.randn(2, 3, 6, 6)
    first, report = run(model, x)
    assert report.cache_hits == 0
    second, report = run(model, x)
    assert report.cache_hits == 1
    assert torch.equal(first, second)
    with torch.no_grad():
        model[0].weight.mul_(2)  # weights are no part of what is kept
        third, report = run(model, x)
        assert report.cache_hits == 1
        torch.testing.assert_close(third, model(x))


def test_a_damaged_model_is_refused():
    _, report = run(nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid()), torch.randn(3))
    (block,) = report.executable.static_program.blocks
    parts = block.executable.dump()
    backend = dynamo_backends.get_backend("onnxrt")
    loaded = backend.load(parts, block.executable.graph, backend.Options())
    x = torch.randn(3)
    torch.testing.assert_close(loaded.bind(())[0]([x])[0], x.relu().tanh().sigmoid())
    for damaged in ({"model": parts["model"]}, {**parts, "model": b"nothing"}):
        with pytest.raises(CompileError, match="cannot be used"):
            backend.load(damaged, block.executable.graph, backend.Options())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_saved_model_runs_in_plain_onnxruntime(
    tmp_path: Path, memory_format: torch.memory_format
):
    model = net().to(memory_format=memory_format)
    x = torch.randn(2, 3, 6, 6).to(memory_format=memory_format)
    result, report = run(model, x)
    path = tmp_path / "model.onnx"
    ort.save(report, path, input_names=["image"], output_names=["features"])
    assert list(tmp_path.glob("model*")) == [path]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["image"]
    assert [o.name for o in session.get_outputs()] == ["features"]
    (features,) = session.run(None, {"image": np.ascontiguousarray(x.numpy())})
    np.testing.assert_allclose(features, result.numpy(), rtol=1e-5, atol=1e-6)


def test_weights_of_a_large_model_go_to_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.ort import saving

    monkeypatch.setattr(saving, "_ONE_FILE", 1000)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval(), torch.ones(64)
    result, report = run(model, x)
    saving.save(report, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").stat().st_size >= 64 * 64 * 4
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(["output_0"], {"input_0": x.numpy()})
    np.testing.assert_allclose(found, result.numpy(), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_saved_says_why(tmp_path: Path):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x.exp() * 2 + 1).sin() * 3

    _, report = run(fn, torch.randn(3), min_block_size=1)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match=r"1 operators in eager \(aten.special_bessel_j0"):
        ort.save(report, tmp_path / "model.onnx")
    model = net()
    _, report = run(model, torch.randn(1, 3, 6, 6))
    with pytest.raises(ValueError, match="has 1 inputs, but 2 names were given"):
        ort.save(report, tmp_path / "model.onnx", input_names=["a", "b"])
    del model
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(CompileError, match="keep it alive"):
        ort.save(report, tmp_path / "model.onnx")
