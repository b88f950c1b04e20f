"""A machine for CUDA graphs: the double on the CPU, and CUDA itself where there is one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dynamo_backends.cudagraphs import device
from dynamo_backends.cudagraphs.captured import GraphedFunction
from tests.cudagraphs.double import DoubleCuda

KINDS = ["double", "cuda"] if torch.cuda.is_available() else ["double"]


@dataclass
class Machine:
    """Where a test runs.

    Attributes:
        device: For tensors.
        double: The double; None on CUDA.
    """

    device: torch.device
    double: DoubleCuda | None

    def stream(self, name: str) -> Any:
        """Another stream, to be used in `with machine.on(stream)`."""
        from tests.cudagraphs.double import Stream

        return Stream(name) if self.double is not None else torch.cuda.Stream()

    def on(self, stream: Any) -> Any:
        return device.driver().use(stream)

    def current(self) -> Any:
        return device.driver().current_stream(0)


def install(monkeypatch: pytest.MonkeyPatch) -> DoubleCuda:
    """Puts the double in CUDA's place, which then sees all that captured functions do."""
    double = DoubleCuda()
    call = GraphedFunction.__call__

    def watched(self: GraphedFunction, inputs: list[Any]) -> Any:
        if double.mode.active:
            return call(self, inputs)
        with double.mode:
            return call(self, inputs)

    monkeypatch.setattr(device, "_driver", double)
    monkeypatch.setattr(GraphedFunction, "__call__", watched)
    return double


@pytest.fixture(params=KINDS)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The double, and CUDA where there is one."""
    if request.param == "cuda":
        yield Machine(torch.device("cuda", 0), None)
        return
    yield Machine(torch.device("cpu"), install(monkeypatch))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> DoubleCuda:
    """The double alone, for what only it can tell."""
    return install(monkeypatch)
