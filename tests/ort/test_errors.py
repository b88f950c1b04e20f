"""The texts of errors: a missing package, a missing device, tensors elsewhere."""

import subprocess
import sys

import pytest
import torch
from torch import fx

import dynamo_backends
from dynamo_backends import BackendUnavailableError, DeviceError
from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.graph import Graph, Input, Role

WITHOUT = """
import importlib.machinery, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] == {name!r}:
            return None
        return super().find_spec(name, path, target)
sys.meta_path[:] = [Without if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
import torch, dynamo_backends
print(dynamo_backends.get_backend("onnxrt").availability())
try:
    torch.compile(torch.nn.ReLU(), backend="onnxrt")(torch.ones(2))
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["onnxruntime", "onnxscript"])
def test_a_missing_package(name: str):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(name=name)], capture_output=True, text=True
    )
    assert f"reason='{name} is not installed'" in done.stdout, done.stderr
    expected = f"'onnxrt' cannot run here: {name} is not installed. To mend it: "
    assert expected + "pip install 'dynamo-backends[onnx]'" in done.stdout


def test_importing_the_package_imports_no_vendor():
    code = (
        "import torch, sys, dynamo_backends, dynamo_backends.ort;"
        "print([m for m in ('onnx', 'onnxruntime', 'onnxscript') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_with_a_wheel_for_cpus():
    with pytest.raises(Exception, match="cannot run here") as info:
        torch.compile(torch.nn.ReLU(), backend="onnxrt_cuda")(torch.ones(2))
    error = getattr(info.value, "inner_exception", None) or info.value.__cause__ or info.value
    assert isinstance(error, BackendUnavailableError)
    assert "the installed onnxruntime has no CUDA provider" in str(error)
    assert "pip install onnxruntime-gpu" in str(error)


def on_cuda() -> Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, device="cuda")
    graph.output((x,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Graph(module, "inference", (Input("x", Role.ACTIVATION),))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("onnxrt_cpu", "onnxrt_cpu runs tensors on cpu, and an input is on cuda"),
        ("onnxrt", "the tensors are on a CUDA device, but the installed onnxruntime has no CUDA"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_tensors(name: str, text: str):
    backend = dynamo_backends.get_backend(name)
    with pytest.raises(DeviceError, match=text):
        backend.prepare(on_cuda(), backend.Options())


def test_cpu_tensors_given_to_the_cuda_backend():
    backend = dynamo_backends.get_backend("onnxrt_cuda")
    graph = on_cuda()
    graph.placeholders[0].meta["val"] = torch.empty(4)
    with pytest.raises(DeviceError, match="onnxrt_cuda runs tensors on cuda, and an input is on c"):
        backend.prepare(graph, backend.Options())


def test_the_provider_follows_the_device():
    from dynamo_backends.ort.backend import OrtOptions, _settings

    value = on_cuda().placeholders[0].meta["val"]
    settings = _settings([value], OrtOptions(provider_options={"gpu_mem_limit": "1000"}))
    assert [name for name, _ in settings.providers] == [
        "CUDAExecutionProvider",
        "CPUExecutionProvider",
    ]
    assert dict(settings.providers[0][1]) == {"gpu_mem_limit": "1000", "device_id": "0"}
    assert settings.device == ("cuda", 0)
