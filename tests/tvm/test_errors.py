"""The texts of errors, and that TVM's import leaves the process as it is."""

import pytest

import dynamo_backends
from tests import refusals

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
run = torch.compile(torch.nn.Sigmoid(), backend="tvm", options={"min_block_size": 1})
print(run(torch.zeros(2)).tolist())
print("tvm" in sys.modules, [k for k, v in state().items() if v != before[k]])
"""


@pytest.mark.long
def test_the_package_is_missing():
    said = refusals.without("tvm", ("tvm",))
    assert "reason='apache-tvm is not installed'" in said
    expected = "'tvm' cannot run here: apache-tvm is not installed. To fix it: "
    assert expected + "pip install 'dynamo-backends[tvm]'" in said


@pytest.mark.long
def test_using_it_changes_nothing_and_needs_no_other_vendors_package():
    others = ("jax", "jaxlib", "onnx", "onnxruntime", "onnxscript", "openvino", "xgboost")
    assert refusals.run(HARMLESS, others).splitlines() == ["[]", "[0.5, 0.5]", "True []"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_thread": 1}, "Did you mean 'num_threads'"),
        ({"num_threads": -1}, "must be at least 0, not -1"),
        ({"tune_trial": 8}, "Did you mean 'tune_trials'"),
        ({"tune_trials": -1}, "option 'tune_trials' of tvm must be at least 0, not -1"),
        ({"tune_trials": "many"}, "must be int, not 'many' (str)"),
        ({"tune_budget_s": 0}, "option 'tune_budget_s' of tvm must be at least 1, not 0"),
    ],
)
def test_wrong_options(options: dict[str, object], text: str):
    refusals.options_are_refused("tvm", options, text)


def test_tensors_on_another_device():
    text = "tvm supports only CPU tensors, but an input is on cuda"
    refusals.tensor_is_refused("tvm", "cuda", text)


@pytest.mark.parametrize("name", ["ansor", "tvm_meta_schedule"])
def test_names_of_former_times(name: str):
    assert dynamo_backends.get_backend(name) is dynamo_backends.get_backend("tvm")
