"""nvFuser's programs as CUDA graphs: two doubles that compute, or nvFuser itself on a GPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends.interface import registry
from tests.cudagraphs.conftest import Machine
from tests.nvfuser.conftest import is_real, nvfuser

__all__ = ["nvfuser"]  # the fixture


@pytest.fixture
def machine(machine: Machine) -> Machine:
    if machine.double is None and not is_real():
        pytest.skip("nvFuser is not installed, and its double is for the CPU")
    return machine


@pytest.fixture(autouse=True)
def _made_anew():
    """The backend is made for the device of this test."""
    registry.get_backend.cache_clear()
    yield
    registry.get_backend.cache_clear()


def block(x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x * 2 + y), x.shape[-1:]).softmax(-1)


def test_fusions_are_recorded(machine: Machine, nvfuser: str):
    compiled = torch.compile(block, backend=dynamo_backends.compiler("nvfuser_cudagraphs"))
    with dynamo_backends.record() as reports:
        for _ in range(5):
            x, y = (torch.randn(4, 8, device=machine.device) for _ in range(2))
            torch.testing.assert_close(compiled(x, y), block(x, y), rtol=1e-4, atol=1e-5)
    assert sum(r.cuda_graphs for r in reports) >= 1
    assert not any(r.uncaptured or r.runtime_fallbacks for r in reports), reports


def test_training(machine: Machine, nvfuser: str):
    module = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(machine.device)
    compiled = torch.compile(module, backend=dynamo_backends.compiler("nvfuser_cudagraphs"))
    with dynamo_backends.record() as reports:
        for _ in range(5):
            x = torch.randn(4, 8, device=machine.device)
            gradients = []
            for function in (module, compiled):
                module.zero_grad()
                function(x).square().mean().backward()
                gradients.append([p.grad.clone() for p in module.parameters()])
            torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    assert {r.kind for r in reports} == {"forward", "backward"}
    assert sum(r.cuda_graphs for r in reports) >= 2
    assert not any(r.uncaptured or r.runtime_fallbacks for r in reports), reports
