"""How TensorRT says no: packages, versions, devices, options."""

import sys
import types
from typing import Any

import pytest
import torch

import dynamo_backends
from dynamo_backends import OptionError
from dynamo_backends.trt import backend, vendor
from dynamo_backends.trt import device as seam
from tests import refusals
from tests.trt.conftest import REAL, Machine, install
from tests.trt.helpers import net


@pytest.mark.long
@pytest.mark.skipif(REAL, reason="TensorRT and a GPU are here")
def test_without_the_packages():
    said = refusals.without("tensorrt", ("tensorrt", "torch_tensorrt"), _ALSO_FX2TRT)
    assert "reason='tensorrt is not installed'" in said
    expected = "'tensorrt' cannot run here: tensorrt is not installed. To fix it: "
    assert expected + "pip install 'dynamo-backends[tensorrt]'" in said
    expected = "'fx2trt' cannot run here: torch_tensorrt is not installed ('tensorrt' needs "
    assert expected in said
    assert "pip install torch-tensorrt" in said


_ALSO_FX2TRT = """
try:
    torch.compile(torch.nn.Tanh(), backend=dynamo_backends.compiler("fx2trt"))(torch.zeros(2))
except Exception as error:
    print(error)
"""


def test_without_the_packages_of_the_lowering(monkeypatch: pytest.MonkeyPatch):
    packages = {"onnx": "onnx", "no_such_module": "no-such-package"}
    monkeypatch.setattr(backend.TensorRT, "packages", packages)
    found = dynamo_backends.get_backend("tensorrt").availability()
    assert found.reason == "no-such-package is not installed"
    assert found.remedy == "pip install 'dynamo-backends[tensorrt]'"


def test_importing_the_folder_imports_no_vendor():
    code = (
        "import torch, sys, dynamo_backends, dynamo_backends.trt, dynamo_backends.trt.backend;"
        "print([m for m in ('onnx', 'tensorrt', 'torch_tensorrt') if m in sys.modules])"
    )
    assert refusals.run(code).strip() == "[]"


def test_bindings_without_libraries(monkeypatch: pytest.MonkeyPatch):
    def broken() -> Any:
        raise ImportError("libnvinfer.so.11: cannot open shared object file\nmore")

    install(monkeypatch, 11)
    monkeypatch.setattr(vendor, "tensorrt", broken)
    found = dynamo_backends.get_backend("tensorrt").availability()
    assert not found.usable
    assert found.reason == (
        "tensorrt cannot be imported (libnvinfer.so.11: cannot open shared object file)"
    )


@pytest.mark.parametrize("version", ["8.6.1", "10.3.0", "12.0.0"])
def test_other_versions(monkeypatch: pytest.MonkeyPatch, version: str):
    install(monkeypatch, 11)
    monkeypatch.setattr(sys.modules["tensorrt"], "__version__", version)
    found = dynamo_backends.get_backend("tensorrt").availability()
    assert (
        found.reason == f"tensorrt {version} is not supported; install a version from 10.14 to 11.x"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, 11)
    monkeypatch.setattr(seam, "_driver", seam.Cuda())
    found = dynamo_backends.get_backend("tensorrt").availability()
    assert not found.usable
    assert "CUDA" in found.reason
    assert found.remedy == seam.Cuda().remedy()
    assert found.remedy.startswith(("pip install torch", "nvidia-smi"))


@pytest.mark.parametrize("name", ["tensorrt", "fx2trt"])
def test_cpu_tensors(monkeypatch: pytest.MonkeyPatch, name: str):
    install(monkeypatch, 11)
    monkeypatch.setattr(seam, "_driver", seam.Cuda())
    text = (
        rf"{name} runs on CUDA tensors, and an input is on cpu; move the model and its inputs "
        r"\(model.to\('cuda'\)\), or use backend='onnxrt'"
    )
    refusals.tensor_is_refused(name, "cpu", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, "one of 'fp32', 'tf32', 'fp16', 'bf16'"),
        ({"optimization_level": 6}, "must be 0 to 5, not 6"),
        ({"workspace": -1}, "'workspace' of tensorrt must be at least 0, not -1"),
        ({"weight_streaming": -2}, "must be at least -1, not -2"),
        ({"max_size": 0}, "must be at least 1, not 0"),
        ({"weight_streaming": 1, "strongly_typed": False}, "needs strongly_typed=True"),
        ({"hardware_compatible": True}, "Did you mean 'hardware_compatibility'"),
        ({"beyond_profile": "error"}, "one of 'rebuild', 'refuse'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        dynamo_backends.get_backend("tensorrt").Options.parse(options, "tensorrt")


def test_version_11_has_no_weakly_typed_networks(double: Machine):
    with pytest.raises(Exception, match="strongly_typed") as info:
        torch.compile(net(), backend="tensorrt", options={"strongly_typed": False})(torch.ones(6))
    error = refusals.cause(info)
    assert isinstance(error, OptionError)
    assert "must be True with TensorRT 11" in str(error)


def test_what_the_builder_refuses_runs_in_eager(double: Machine, monkeypatch: pytest.MonkeyPatch):
    builder = sys.modules["tensorrt"].Builder

    def refuse(self: Any, network: Any, config: Any) -> None:
        network._logger.log(sys.modules["tensorrt"].ILogger.Severity.ERROR, "no tactic for layer 3")

    monkeypatch.setattr(builder, "build_serialized_network", refuse)
    model, x = net(), torch.randn(2, 6)
    with torch.no_grad(), dynamo_backends.record() as reports:
        result = torch.compile(model, backend="tensorrt")(x)
        torch.testing.assert_close(result, model(x))
    (reason,) = {f.reason for f in reports[0].fallbacks}
    assert reason == "TensorRT cannot build an engine: no tactic for layer 3"


def test_the_logger_of_each_package_is_made_once(double: Machine):
    assert vendor.logger() is vendor.logger()
    assert isinstance(sys.modules["tensorrt"], types.ModuleType)
    assert vendor.last_error() == "it gives no reason"
