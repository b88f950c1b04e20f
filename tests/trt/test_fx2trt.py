"""torch_tensorrt's compiler behind the pipeline."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import OptionError
from dynamo_backends.trt import fx2trt_backend
from tests import backend_checks
from tests.checking import check
from tests.doubles import torch_tensorrt
from tests.trt.conftest import Machine
from tests.trt.helpers import net, reasons


@pytest.fixture
def vendor(double: Machine, monkeypatch: pytest.MonkeyPatch) -> torch_tensorrt.Double:
    return torch_tensorrt.install(monkeypatch)


def test_blocks_are_compiled_and_the_rest_is_eager(vendor: torch_tensorrt.Double):
    def fn(x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x.exp() * 2 + 1).sin() * 3 + x

    reports = check(fn, torch.rand(5), ops_in_eager=None, backend="fx2trt", min_block_size=1)
    said = reasons(reports)
    assert said == {"aten.special_bessel_j0.default": "torch_tensorrt has no converter for it"}
    assert len(vendor.compiled) == 2


def test_settings(vendor: torch_tensorrt.Double):
    model, x = net(), torch.randn(4, 6)
    options = {"precision": "fp16", "optimization_level": 5, "workspace": 1 << 20}
    with torch.no_grad():
        result = torch.compile(model, backend="fx2trt", options=options)(x)
        torch.testing.assert_close(result, model(x), rtol=2e-3, atol=2e-3)
    (settings,) = vendor.compiled
    assert settings["optimization_level"] == 5
    assert settings["workspace_size"] == 1 << 20
    assert settings["disable_tf32"]
    assert settings["device"] == torch.device("cpu", 0)
    backend = dynamo_backends.get_backend("fx2trt")
    assert backend.availability().reason == "torch_tensorrt 2.8.0"


def test_weights_are_constants_and_never_stale(vendor: torch_tensorrt.Double):
    changes = ["p.data", "new Parameter", "load_state_dict"]
    assert backend_checks.never_stale("fx2trt", changes) >= 2
    assert len(vendor.compiled) >= 3


def test_dynamic_shapes_and_gradients(vendor: torch_tensorrt.Double):
    backend_checks.follows_the_batch("fx2trt")
    torch._dynamo.reset()
    backend_checks.gradients_agree("fx2trt")


def test_what_it_cannot_compile_runs_in_eager(vendor: torch_tensorrt.Double):
    vendor.broken = RuntimeError("Failed to build serialized network\nmore")
    model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid())
    x = torch.randn(4)
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.testing.assert_close(torch.compile(model, backend="fx2trt")(x), model(x))
    (reason,) = {f.reason for f in reports[0].fallbacks}
    assert reason == "torch_tensorrt cannot compile the block: Failed to build serialized network"


@pytest.mark.plants_errors
def test_verification_catches_a_wrong_result(
    vendor: torch_tensorrt.Double, monkeypatch: pytest.MonkeyPatch
):
    original = vendor.compile

    def wrong(module: Any, **settings: Any) -> Any:
        run = original(module, **settings)
        return lambda *args: [x + 1 for x in run(*args)]

    package = types.SimpleNamespace(compile=wrong, __version__="2.8.0")
    monkeypatch.setattr(fx2trt_backend, "_vendor", lambda: package)
    model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid())
    x = torch.randn(4)
    with torch.no_grad(), dynamo_backends.record() as reports:
        run = torch.compile(model, backend="fx2trt", options={"verify": "first"})
        torch.testing.assert_close(run(x), model(x))
    assert "computed a wrong result" in reports[0].runtime_fallbacks[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimization_level": 9}, "must be 0 to 5, not 9"),
        ({"workspace": -5}, "must be at least 0, not -5"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        dynamo_backends.get_backend("fx2trt").Options.parse(options, "fx2trt")


def test_a_broken_package(vendor: torch_tensorrt.Double, monkeypatch: pytest.MonkeyPatch):
    def broken() -> Any:
        raise OSError("libtorchtrt.so: undefined symbol")

    monkeypatch.setattr(fx2trt_backend, "_vendor", broken)
    found = dynamo_backends.get_backend("fx2trt").availability()
    assert not found.usable
    assert "cannot be imported (libtorchtrt.so: undefined symbol)" in found.reason
