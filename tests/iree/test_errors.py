"""The texts of errors: a missing package, wrong options, tensors elsewhere."""

from typing import Any

import pytest

import dynamo_backends
from dynamo_backends.interface import packages
from tests import refusals


@pytest.mark.long
def test_both_packages_are_missing():
    missing = "iree-base-compiler and iree-base-runtime are not installed"
    said = refusals.without("iree", ("iree",))
    assert f"reason='{missing}'" in said
    expected = f"'iree' cannot run here: {missing}. To fix it: "
    assert expected + "pip install 'dynamo-backends[iree]'" in said


def test_one_package_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "is_module_installed", lambda name: name == "iree.compiler")
    available = dynamo_backends.get_backend("iree").availability()
    assert not available.usable
    assert available.reason == "iree-base-runtime is not installed"


def test_importing_it_imports_no_vendor():
    code = (
        "import sys, dynamo_backends, dynamo_backends.iree, dynamo_backends.iree.backend\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'iree'])\n"
    )
    assert refusals.run(code).strip() == "[]"


def test_it_needs_no_other_vendor_and_the_process_ends_in_order():
    """With results that are alive at its end, whose memory is IREE's, and threads that sleep."""
    others = ("jax", "jaxlib", "onnx", "onnxruntime", "onnxscript", "openvino", "tvm")
    said = refusals.without(
        "iree",
        others,
        "import time\n"
        "torch.set_num_threads(2)\n"
        "compiled = torch.compile(torch.exp, backend=backend)\n"
        "results = [compiled(torch.zeros(3)) for _ in range(3)]\n"
        "before = time.process_time()\n"
        "time.sleep(0.5)\n"
        "print(results[-1].tolist(), time.process_time() - before < 0.25)\n",
    )
    assert said.splitlines()[1:] == ["[0.5, 0.5]", "[1.0, 1.0, 1.0] True"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optlevel": "O3"}, "Did you mean 'opt_level'"),
        ({"opt_level": "O4"}, "must be one of 'O3', 'O2', 'O1', 'O0', not 'O4'"),
        ({"num_threads": -1}, "must be at least 0, not -1"),
        ({"compile_seconds": 0}, "must be at least 1, not 0"),
        ({"compiler_flags": ("-O3",)}, "'-O3' does not begin with '--'"),
        ({"compiler_flags": "--x"}, "must be a tuple of str, not '--x'"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str):
    refusals.options_are_refused("iree", options, text)


def test_tensors_on_another_device():
    text = "iree supports only CPU tensors, but an input is on cuda"
    refusals.tensor_is_refused("iree", "cuda", text)
