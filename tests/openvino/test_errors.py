"""The texts of errors: a missing package, an absent device, wrong options."""

import subprocess
import sys

import pytest
import torch
from torch import fx, nn

import dynamo_backends
from dynamo_backends import DeviceError, OptionError
from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.graph import Graph, Input, Role

WITHOUT = """
import importlib.machinery, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            return None
        return super().find_spec(name, path, target)
sys.meta_path[:] = [Without if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
import torch, dynamo_backends
print(dynamo_backends.get_backend("ov").availability())
try:
    y = torch.compile(torch.nn.Sigmoid(), backend="ov")(torch.zeros(2))
    print(y.tolist())
except Exception as error:
    print(error)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_is_missing():
    said = run(WITHOUT.format(names=("openvino",)))
    assert "reason='openvino is not installed'" in said
    expected = "'ov' cannot run here: openvino is not installed. To mend it: "
    assert expected + "pip install 'dynamo-backends[openvino]'" in said


def test_it_needs_no_other_vendors_package():
    said = run(WITHOUT.format(names=("jax", "jaxlib", "onnx", "onnxruntime", "onnxscript")))
    assert "[0.5, 0.5]" in said


def test_importing_it_changes_nothing():
    said = run(
        "import sys, torch, torch._dynamo, dynamo_backends.openvino\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'openvino'])\n"
        "before = torch._dynamo.config.get_config_copy(), torch.get_num_threads()\n"
        "torch.compile(torch.nn.Sigmoid(), backend='ov')(torch.zeros(2))\n"
        "print('openvino.frontend.pytorch.torchdynamo.backend' in sys.modules)\n"
        "print(before == (torch._dynamo.config.get_config_copy(), torch.get_num_threads()))\n"
    )
    assert said.splitlines() == ["[]", "False", "True"]


def cause(info: pytest.ExceptionInfo[BaseException]) -> BaseException:
    """The error itself; Dynamo wraps what a backend raises."""
    error = info.value
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


def compile_with(**options: object) -> torch.Tensor:
    return torch.compile(nn.Sigmoid(), backend="ov", options=options)(torch.zeros(2))


@pytest.mark.parametrize("device", ["GPU.7", "Toaster"])
def test_a_device_that_is_absent(device: str):
    with pytest.raises(Exception, match="was asked for") as info:
        compile_with(device=device)
    error = cause(info)
    assert isinstance(error, DeviceError)
    assert f"device='{device}' was asked for, and OpenVINO finds CPU" in str(error)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precison": "bf16"}, "Did you mean 'precision'"),
        ({"precision": "fp16"}, "must be one of 'float32', 'bf16'"),
        ({"num_threads": -1}, "must be 0 (as many as torch has) or more, not -1"),
        ({"config": {"NUM_STREAMS": [1]}}, "must map names of OpenVINO's properties"),
        ({"config": {"NUM_STREAM": 1}}, "no property 'NUM_STREAM' that can be set. Did you mean"),
    ],
)
def test_wrong_options(options: dict[str, object], text: str):
    with pytest.raises(Exception, match="ov") as info:
        compile_with(**options)
    error = cause(info)
    assert isinstance(error, OptionError)
    assert text in str(error)


def test_tensors_on_another_device():
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, device="cuda")
    graph.output((x,))
    module = fx.GraphModule(nn.Module(), graph)
    given = Graph(module, "inference", (Input("x", Role.ACTIVATION),))
    backend = dynamo_backends.get_backend("ov")
    with pytest.raises(DeviceError, match="ov reads tensors on the CPU, and an input is on cuda"):
        backend.prepare(given, backend.Options())
