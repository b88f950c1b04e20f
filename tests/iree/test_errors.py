"""The texts of errors: a missing package, wrong options, tensors elsewhere."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import fx, nn

import dynamo_backends
from dynamo_backends import DeviceError, OptionError
from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.iree import backend

WITHOUT = """
import importlib.machinery, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in {names!r}:
            return None
        return super().find_spec(name, path, target)
sys.meta_path[:] = [Without if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
import torch, dynamo_backends
backend = dynamo_backends.compiler("iree")
print(dynamo_backends.get_backend("iree").availability())
try:
    print(torch.compile(torch.nn.ReLU(), backend=backend)(torch.tensor([-1.0, 2.0])).tolist())
except Exception as error:
    print(error)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_packages_are_missing():
    missing = "iree-base-compiler and iree-base-runtime are not installed"
    said = run(WITHOUT.format(names=("iree",)))
    assert f"reason='{missing}'" in said
    expected = f"'iree' cannot run here: {missing}. To mend it: "
    assert expected + "pip install 'dynamo-backends[iree]'" in said


def test_one_package_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "_is_installed", lambda name: name == "iree.compiler")
    available = dynamo_backends.get_backend("iree").availability()
    assert not available.usable
    assert available.reason == "iree-base-runtime is not installed"


def test_importing_it_imports_no_vendor():
    code = (
        "import sys, dynamo_backends, dynamo_backends.iree, dynamo_backends.iree.backend\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'iree'])\n"
    )
    assert run(code).strip() == "[]"


def test_it_needs_no_other_vendor_and_the_process_ends_in_order():
    """With results that are alive at its end, whose memory is IREE's, and threads that sleep."""
    others = ("jax", "jaxlib", "onnx", "onnxruntime", "onnxscript", "openvino", "tvm")
    code = WITHOUT.format(names=others) + (
        "import time\n"
        "torch.set_num_threads(2)\n"
        "compiled = torch.compile(torch.exp, backend=backend)\n"
        "results = [compiled(torch.zeros(3)) for _ in range(3)]\n"
        "before = time.process_time()\n"
        "time.sleep(0.5)\n"
        "print(results[-1].tolist(), time.process_time() - before < 0.25)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["[0.0, 2.0]", "[1.0, 1.0, 1.0] True"]
    assert "leaked" not in done.stderr


def cause(info: pytest.ExceptionInfo[BaseException]) -> BaseException:
    """The error itself; Dynamo wraps what a backend raises."""
    error = info.value
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optlevel": "O3"}, "Did you mean 'opt_level'"),
        ({"opt_level": "O4"}, "must be one of 'O3', 'O2', 'O1', 'O0', not 'O4'"),
        ({"num_threads": -1}, "must be 0 (as many as torch has) or more, not -1"),
        ({"compile_seconds": 0}, "must be at least 1, not 0"),
        ({"compiler_flags": ("-O3",)}, "'-O3' does not begin with '--'"),
        ({"compiler_flags": "--x"}, "must be a tuple of str, not '--x'"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str):
    with pytest.raises(Exception, match="iree") as info:
        torch.compile(nn.Sigmoid(), backend="iree", options=options)(torch.zeros(2))
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
    iree = dynamo_backends.get_backend("iree")
    with pytest.raises(DeviceError, match="iree reads tensors on the CPU, and an input is on cuda"):
        iree.prepare(given, iree.Options())
