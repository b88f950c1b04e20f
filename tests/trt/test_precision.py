"""Precision: in the graph for strongly typed networks, flags for others."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dynamo_backends.trt.engine_builder import Settings
from dynamo_backends.trt.options import TensorRTOptions
from tests.trt.conftest import Machine
from tests.trt.helpers import compiled, executable, net


def flags(machine: Machine) -> set[str]:
    return set(machine.log.builds[-1]["flags"])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_products_in_reduced_precision(machine: Machine, precision: str, tolerance: float):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 5)).eval()
    model, x = model.to(machine.device), torch.randn(2, 3, 6, 6, device=machine.device)
    run, report = compiled(model, x, precision=precision)
    with torch.no_grad():
        result, expected = run(x), model(x)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
        assert (result - expected).abs().max() > 1e-6, "it was not reduced"
        model[3].weight.mul_(3)
        torch.testing.assert_close(run(x), model(x), rtol=tolerance, atol=3 * tolerance)
    assert report.fallbacks == ()
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    graph = executable(report).graph
    weights = {graph.placeholders[i].meta["val"].dtype for i in graph.weights}
    assert weights == {dtype}
    if machine.log is not None:
        assert machine.log.builds[-1]["strongly_typed"]
        assert not flags(machine) & {"FP16", "BF16", "TF32"}


@pytest.mark.parametrize("machine", ["10"], indirect=True)
@pytest.mark.parametrize(("precision", "flag"), [("fp16", "FP16"), ("bf16", "BF16")])
def test_weakly_typed_networks_have_flags(double: Machine, precision: str, flag: str):
    model, x = net(), torch.randn(4, 6)
    run, _ = compiled(model, x, precision=precision, strongly_typed=False)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert flag in flags(double)
    assert not double.log.builds[-1]["strongly_typed"]


@pytest.fixture
def torchs_flags() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = before


def test_tf32_follows_torch(double: Machine, torchs_flags: None):
    for products, convolutions in (("tf32", "ieee"), ("ieee", "tf32"), ("tf32", "tf32")):
        torch.backends.cuda.matmul.fp32_precision = products
        torch.backends.cudnn.conv.fp32_precision = convolutions
        torch._dynamo.reset()
        compiled(net(), torch.randn(4, 6))
        assert ("TF32" in flags(double)) == (products == convolutions == "tf32")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch._dynamo.reset()
    compiled(net(), torch.randn(4, 6), precision="tf32")
    assert "TF32" in flags(double)


def test_engines_of_other_precisions_have_other_keys(double: Machine):
    options = [TensorRTOptions(precision=p) for p in ("fp32", "tf32", "fp16", "bf16")]
    keys = {Settings.of(o, 0).key() for o in options}
    assert len(keys) == 4
    strict = TensorRTOptions(freezing="strict", fallback="error")
    assert Settings.of(strict, 0).key() == Settings.of(options[0], 0).key()
