"""Engines as files."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dynamo_backends import CompileError, DeviceError, trt
from dynamo_backends.trt import device as seam
from tests.trt.conftest import ALL, Machine
from tests.trt.helpers import compiled, net


@pytest.mark.parametrize("machine", ALL, indirect=True)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_saved_engine_runs_again(machine: Machine, tmp_path: Path, memory: torch.memory_format):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    model, x = model.to(machine.device), torch.randn(2, 3, 6, 6, device=machine.device)
    x = x.to(memory_format=memory)
    run, report = compiled(model, x)
    path = tmp_path / "model.engine"
    with torch.no_grad():
        model[0].weight.mul_(2)
        expected = run(x)
    trt.save(report, path)
    assert sorted(p.name for p in tmp_path.glob("model*")) == ["model.engine", "model.engine.json"]
    engine = trt.load(path)
    for _ in range(2):
        (result,) = engine(x)
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()


def test_a_loaded_engine_checks_what_it_is_given(double: Machine, tmp_path: Path):
    x = torch.randn(4, 6)
    _, report = compiled(net(), x)
    trt.save(report, tmp_path / "net")
    engine = trt.load(tmp_path / "net")
    with pytest.raises(TypeError, match="takes 1 tensors, not 2"):
        engine(x, x)
    with pytest.raises(ValueError, match=r"compiled for torch.float32\[4, 6\]"):
        engine(torch.randn(5, 6))
    with pytest.raises(DeviceError, match="runs on cpu:0, and a tensor is on meta"):
        engine(x.to("meta"))


def test_what_cannot_be_loaded_says_why(
    double: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _, report = compiled(net(), torch.randn(4, 6))
    path = tmp_path / "net"
    trt.save(report, path)
    facts = json.loads((tmp_path / "net.json").read_text())
    with pytest.raises(CompileError, match="does not describe an engine"):
        trt.load(tmp_path / "other")
    changed = {**facts, "inputs": [{**facts["inputs"][0], "dtype": "float16"}]}
    (tmp_path / "net.json").write_text(json.dumps(changed))
    with pytest.raises(CompileError, match="the engine has the tensors"):
        trt.load(path)
    (tmp_path / "net.json").write_text(json.dumps(facts))
    assert double.host is not None
    double.host.name = "double 7.5"
    text = r"was made by TensorRT 11.* on double 8.0: .*the plan is of another device"
    with pytest.raises(CompileError, match=text):
        trt.load(path)
    monkeypatch.setattr(seam, "_driver", seam.Cuda())
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="cannot be loaded here: torch"):
            trt.load(path)


def test_what_cannot_be_saved_says_why(double: Machine, tmp_path: Path):
    x = torch.randn(3, 6)
    _, report = compiled(lambda x: torch.special.bessel_j0(x.exp() + 1) * 2, x, min_block_size=1)
    with pytest.raises(CompileError, match=r"1 operators in eager \(aten.special_bessel_j0"):
        trt.save(report, tmp_path / "x")
    torch._dynamo.reset()
    _, report = compiled(net(), x, dynamic=True)
    with pytest.raises(CompileError, match="dynamic=False"):
        trt.save(report, tmp_path / "x")
    torch._dynamo.reset()
    with pytest.raises(AttributeError, match="has no attribute 'store_engine'"):
        trt.store_engine  # noqa: B018
