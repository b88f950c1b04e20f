"""The texts of errors: a missing package, a missing device, tensors elsewhere."""

import pytest
import torch

from dynamo_backends import BackendUnavailableError
from tests import refusals


@pytest.mark.parametrize("name", ["onnxruntime", "onnxscript"])
def test_a_missing_package(name: str):
    said = refusals.without("onnxrt", (name,))
    assert f"reason='{name} is not installed'" in said
    expected = f"'onnxrt' cannot run here: {name} is not installed. To fix it: "
    assert expected + "pip install 'dynamo-backends[onnx]'" in said


def test_importing_the_package_imports_no_vendor():
    code = (
        "import torch, sys, dynamo_backends, dynamo_backends.ort;"
        "print([m for m in ('onnx', 'onnxruntime', 'onnxscript') if m in sys.modules])"
    )
    assert refusals.run(code).strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_with_a_wheel_for_cpus():
    with pytest.raises(Exception, match="cannot run here") as info:
        torch.compile(torch.nn.ReLU(), backend="onnxrt_cuda")(torch.ones(2))
    error = refusals.cause(info)
    assert isinstance(error, BackendUnavailableError)
    assert "the installed onnxruntime has no CUDA provider" in str(error)
    assert "pip install onnxruntime-gpu" in str(error)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("onnxrt_cpu", "onnxrt_cpu runs tensors on cpu, and an input is on cuda"),
        ("onnxrt", "the tensors are on a CUDA device, but the installed onnxruntime has no CUDA"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_tensors(name: str, text: str):
    refusals.tensor_is_refused(name, "cuda", text)


def test_cpu_tensors_given_to_the_cuda_backend():
    text = "onnxrt_cuda runs tensors on cuda, and an input is on cpu"
    refusals.tensor_is_refused("onnxrt_cuda", "cpu", text)


def test_the_provider_follows_the_device():
    from dynamo_backends.ort.backend import OrtOptions, _settings

    graph = refusals.graph_on("cuda")
    settings = _settings(graph.placeholders, OrtOptions(provider_options={"gpu_mem_limit": "1000"}))
    assert [name for name, _ in settings.providers] == [
        "CUDAExecutionProvider",
        "CPUExecutionProvider",
    ]
    assert dict(settings.providers[0][1])["gpu_mem_limit"] == "1000"
    assert settings.device == ("cuda", 0)
