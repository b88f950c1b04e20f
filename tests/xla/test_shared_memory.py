"""Models whose parameters share memory, on a device that shares none with torch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends import compile_step
from dynamo_backends.interface.errors import DeviceError
from dynamo_backends.xla import to_device
from tests.aot.step_checks import assert_one_program
from tests.doubles.remote import RemoteDouble


class Tied(nn.Module):
    """Two parameters on one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.last.weight.data = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Flat(nn.Module):
    """Parameters that are views of one buffer, as flattening optimizers make them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.randn(20))
        self.weight = nn.Parameter(self.flat[:16].view(4, 4).T)
        self.bias = nn.Parameter(self.flat[16:])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def _edit(model: Any) -> None:
    with torch.no_grad():
        if isinstance(model, Tied):
            model.first.weight[1].mul_(3)
        else:
            model.flat[3:18].mul_(3)
            model.bias[0] = 5


@pytest.mark.parametrize("kind", [Tied, Flat])
def test_edits_are_seen_by_all_that_share(device: RemoteDouble, kind: type[nn.Module]):
    eager = kind()
    model = to_device(kind(), "remote")
    model.load_state_dict(eager.state_dict())
    run = torch.compile(model, backend="openxla", options={"fallback": "error"})
    x = torch.randn(3, 4)
    resident = to_device(x, "remote")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(resident), eager(x))
            _edit(model)
            _edit(eager)
        torch.testing.assert_close(run(resident), eager(x))


@pytest.mark.parametrize("kind", [Tied, Flat])
def test_they_share_after_they_came_back(device: RemoteDouble, kind: type[nn.Module]):
    eager = kind()
    model = to_device(kind(), "remote")
    model.load_state_dict(eager.state_dict())
    x = torch.randn(3, 4)
    with torch.no_grad():
        to_device(model, "cpu")
        assert all(type(p) is nn.Parameter for p in model.parameters())
        _edit(model)
        _edit(eager)
        torch.testing.assert_close(model(x), eager(x))


def test_memory_moves_once(device: RemoteDouble):
    model = to_device(Flat(), "remote")
    x = to_device(torch.randn(3, 4), "remote")
    with torch.no_grad(), device.traffic.counted() as traffic:
        model(x)
    assert traffic.uploads == [(20,)]


@pytest.mark.parametrize("kind", [Tied, Flat])
def test_steps_train_them_as_eager_does(device: RemoteDouble, kind: type[nn.Module]):
    eager = kind()
    model = to_device(kind(), "remote")
    model.load_state_dict(eager.state_dict())
    given = [torch.randn(3, 4) for _ in range(3)]

    def trainer(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return train, optimizer

    train, optimizer = trainer(model)
    step, reference = compile_step(train, model=model, optimizer=optimizer), trainer(eager)[0]
    for x in given:
        assert step(x).item() == pytest.approx(reference(x).item(), rel=1e-4)
    assert_one_program(step, 3)
    for found, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected.detach())


def test_conjugates_that_share_are_refused(device: RemoteDouble):
    model = nn.Module()
    model.register_buffer("plain", torch.randn(3, dtype=torch.complex64))
    model.register_buffer("conjugate", model.plain.conj())
    with pytest.raises(
        DeviceError, match=r"shares storage with another tensor .* resolve_conj\(\)"
    ):
        to_device(model, "remote")
    model.conjugate = copy.deepcopy(model.conjugate).resolve_conj()
    to_device(model, "remote")
    assert torch.equal(model.plain.host().conj().resolve_conj(), model.conjugate.host())
