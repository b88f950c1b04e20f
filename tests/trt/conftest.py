"""A machine for TensorRT: the double on the CPU, or TensorRT itself where it and a GPU are."""

import gc
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dynamo_backends import get_backend
from dynamo_backends.trt import device as seam
from dynamo_backends.trt.store import PROGRAMS
from tests.doubles.tensorrt import HostDevice, make, memory

REAL = torch.cuda.is_available() and importlib.util.find_spec("tensorrt") is not None
NEWEST = ["real"] if REAL else ["11"]
ALL = ["real"] if REAL else ["10", "11"]


@dataclass
class Machine:
    """Where a test runs.

    Attributes:
        device: For tensors.
        major: Of TensorRT's version.
        log: What was done with the double; None with the real library.
        host: The double of the device; None with the real library.
    """

    device: torch.device
    major: int
    log: Any = None
    host: HostDevice | None = None


def install(monkeypatch: pytest.MonkeyPatch, major: int) -> Machine:
    """Puts the doubles in the places of TensorRT and of CUDA."""
    host = HostDevice()
    module = make(major, host)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(seam, "_driver", host)
    monkeypatch.setattr(get_backend("tensorrt"), "_surveys", None)
    PROGRAMS.clear()
    return Machine(torch.device("cpu"), major, module.double, host)


@pytest.fixture(params=NEWEST)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The newest version; with `@pytest.mark.parametrize("machine", ALL, indirect=True)` each."""
    if request.param == "real":
        import tensorrt

        return Machine(torch.device("cuda"), int(tensorrt.__version__.split(".")[0]))
    return install(monkeypatch, int(request.param))


@pytest.fixture
def double(machine: Machine) -> Machine:
    """The machine, for tests that look into the double."""
    if machine.log is None:
        pytest.skip("looks into the double")
    return machine


@pytest.fixture
def strict_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every address that the double is given must belong to a living tensor of this test."""
    monkeypatch.setattr(memory, "STRICT", [True])
    gc.freeze()  # what other tests left is not looked at
    yield
    gc.unfreeze()
