"""The texts of errors: a missing package, an absent device, wrong options."""

import pytest
import torch
from torch import nn

from dynamo_backends import DeviceError
from tests import refusals


@pytest.mark.long
def test_the_package_is_missing():
    said = refusals.without("ov", ("openvino",))
    assert "reason='openvino is not installed'" in said
    expected = "'ov' cannot run here: openvino is not installed. To fix it: "
    assert expected + "pip install 'dynamo-backends[openvino]'" in said


@pytest.mark.long
def test_using_it_changes_nothing_and_needs_no_other_vendors_package():
    said = refusals.run(
        "import sys, torch, torch._dynamo, dynamo_backends.openvino\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'openvino'])\n"
        "before = torch._dynamo.config.get_config_copy(), torch.get_num_threads()\n"
        "print(torch.compile(torch.nn.Sigmoid(), backend='ov')(torch.zeros(2)).tolist())\n"
        "print('openvino.frontend.pytorch.torchdynamo.backend' in sys.modules)\n"
        "print(before == (torch._dynamo.config.get_config_copy(), torch.get_num_threads()))\n",
        ("jax", "jaxlib", "onnx", "onnxruntime", "onnxscript"),
    )
    assert said.splitlines() == ["[]", "[0.5, 0.5]", "False", "True"]


@pytest.mark.parametrize("device", ["GPU.7", "Toaster"])
def test_a_device_that_is_absent(device: str):
    with pytest.raises(Exception, match="is not available") as info:
        torch.compile(nn.Sigmoid(), backend="ov", options={"device": device})(torch.zeros(2))
    error = refusals.cause(info)
    assert isinstance(error, DeviceError)
    assert f"device='{device}' is not available: OpenVINO finds CPU" in str(error)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precison": "bf16"}, "Did you mean 'precision'"),
        ({"precision": "fp16"}, "must be one of 'float32', 'bf16'"),
        ({"num_threads": -1}, "must be at least 0, not -1"),
        ({"config": {"NUM_STREAMS": [1]}}, "must map names of OpenVINO properties"),
        ({"config": {"NUM_STREAM": 1}}, "no settable property 'NUM_STREAM'. Did you mean"),
    ],
)
def test_wrong_options(options: dict[str, object], text: str):
    refusals.options_are_refused("ov", options, text)


def test_tensors_on_another_device():
    refusals.tensor_is_refused(
        "ov", "cuda", "ov supports only CPU tensors, but an input is on cuda"
    )
