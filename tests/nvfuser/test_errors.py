"""The texts of errors: a missing package or device, wrong options, tensors elsewhere."""

from typing import Any

import pytest
import torch

import dynamo_backends
from dynamo_backends import BackendUnavailableError
from dynamo_backends.nvfuser import vendor
from tests import refusals
from tests.nvfuser import double
from tests.nvfuser.conftest import is_real


@pytest.mark.long
def test_the_package_is_missing():
    said = refusals.without("nvfuser", [vendor.MODULE])
    available, _, refused = said.splitlines()[:3]
    assert "usable=False" in available
    assert "nvFuser is not installed" in available
    major, minor = torch.__version__.split(".")[:2]
    assert "'nvfuser' cannot run here: nvFuser is not installed" in refused
    assert "To fix it: pip install nvfuser-cu" in refused
    assert f"-torch{major}{minor}" in refused


def test_there_is_no_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with double.installed(), monkeypatch.context() as patch:
        patch.setattr(vendor, "TYPE", "cuda")
        available = dynamo_backends.get_backend("nvfuser").availability()
    assert not available.usable
    assert available.reason == "nvfuser_direct is installed, but torch finds no CUDA device"
    assert available.remedy == ""


def test_it_is_usable(nvfuser: str):
    available = dynamo_backends.get_backend("nvfuser").availability()
    assert available.usable
    assert available.reason.startswith(nvfuser)
    assert available.devices == (vendor.TYPE,)


def test_importing_it_imports_no_vendor():
    code = (
        "import sys, dynamo_backends, dynamo_backends.nvfuser, dynamo_backends.nvfuser.backend\n"
        "dynamo_backends.get_backend('nvfuser').availability()\n"
        "print([m for m in sys.modules if m.split('.')[0].startswith('nvfuser')])\n"
    )
    assert refusals.run(code).strip() == "[]"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mat_mul": True}, "Did you mean 'matmul'"),
        ({"matmul": 1}, "must be bool, not 1"),
        ({"symbolic_sizes": "no"}, "must be bool, not 'no'"),
        ({"max_fusions": 0}, "must be at least 1, not 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str):
    refusals.options_are_refused("nvfuser", options, text)


@pytest.mark.skipif(is_real(), reason="the double makes the CPU count as the device")
def test_tensors_on_the_cpu():
    text = "nvfuser compiles for cuda devices, and an input is on cpu; move the model"
    refusals.tensor_is_refused("nvfuser", "cpu", text)


@pytest.mark.skipif(is_real(), reason="it is installed")
def test_a_call_without_it():
    with pytest.raises(BackendUnavailableError, match=r"is not installed; run: pip install nvfus"):
        vendor.load()


def test_the_command_names_the_build_for_this_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu128")
    assert vendor.remedy() == "pip install nvfuser-cu128-torch213"


def test_a_build_for_another_torch_does_not_load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vendor, "is_installed", lambda: True)
    monkeypatch.setattr(vendor, "_loaded", {})

    def fail(name: str) -> Any:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(vendor.importlib, "import_module", fail)
    with pytest.raises(BackendUnavailableError, match=r"does not load .*undefined symbol"):
        vendor.load()
