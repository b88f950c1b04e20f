"""The texts of errors, and that TVM's import leaves the process as it is."""

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
print(dynamo_backends.get_backend("tvm").availability())
try:
    print(torch.compile(torch.nn.Sigmoid(), backend="tvm")(torch.zeros(2)).tolist())
except Exception as error:
    print(error)
"""

HARMLESS = """
import ctypes, os, signal, sys, torch, torch._dynamo

def state():
    handler = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).sigaction(signal.SIGSEGV, None, handler)
    return {
        "environment": dict(os.environ),
        "excepthook": sys.excepthook,
        "handler": handler.raw[:8],  # the function's address; flags follow it
        "recursion": sys.getrecursionlimit(),
        "threads": torch.get_num_threads(),
        "dynamo": torch._dynamo.config.get_config_copy(),
    }

import dynamo_backends.tvm
print([m for m in ("tvm", "tvm_ffi") if m in sys.modules])
torch.compile(torch.nn.Tanh(), backend="eager")(torch.zeros(2))
before = state()
torch.compile(torch.nn.Sigmoid(), backend="tvm", options={"min_block_size": 1})(torch.zeros(2))
print("tvm" in sys.modules, [k for k, v in state().items() if v != before[k]])
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_the_package_is_missing():
    said = run(WITHOUT.format(names=("tvm",)))
    assert "reason='tvm is not installed'" in said
    expected = "'tvm' cannot run here: tvm is not installed. To mend it: "
    assert expected + "pip install 'dynamo-backends[tvm]'" in said


def test_it_needs_no_other_vendors_package():
    others = ("jax", "jaxlib", "onnx", "onnxruntime", "onnxscript", "openvino", "xgboost")
    assert "[0.5, 0.5]" in run(WITHOUT.format(names=others))


def test_using_it_changes_nothing():
    assert run(HARMLESS).splitlines() == ["[]", "True []"]


def cause(info: pytest.ExceptionInfo[BaseException]) -> BaseException:
    """The error itself; Dynamo wraps what a backend raises."""
    error = info.value
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_thread": 1}, "Did you mean 'num_threads'"),
        ({"num_threads": -1}, "must be 0 (as many as torch has) or more, not -1"),
    ],
)
def test_wrong_options(options: dict[str, object], text: str):
    with pytest.raises(Exception, match="tvm") as info:
        torch.compile(nn.Sigmoid(), backend="tvm", options=options)(torch.zeros(2))
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
    backend = dynamo_backends.get_backend("tvm")
    with pytest.raises(DeviceError, match="tvm runs tensors on the CPU, and an input is on cuda"):
        backend.prepare(given, backend.Options())


@pytest.mark.parametrize("name", ["ansor", "tvm_meta_schedule"])
def test_names_of_former_times(name: str):
    assert dynamo_backends.get_backend(name) is dynamo_backends.get_backend("tvm")
