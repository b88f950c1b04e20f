"""How much memory a training step takes on a device that shares none with torch."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends import compile_step
from dynamo_backends.xla import to_device
from dynamo_backends.xla.resident_step import ResidentStep
from tests.doubles.remote import RemoteDouble, remote_double


@pytest.fixture
def device() -> Iterator[RemoteDouble]:
    """A double of this file's own, where nothing of other tests is freed meanwhile."""
    torch.manual_seed(7)
    yield remote_double(3)
    torch._dynamo.reset()


def _held(device: RemoteDouble) -> int:
    """Bytes of all arrays that the device has."""
    gc.collect()
    arrays = device.client.live_arrays()
    return sum(array.nbytes for array in arrays if not array.is_deleted())


def test_a_step_takes_its_state_and_temporaries(
    device: RemoteDouble, monkeypatch: pytest.MonkeyPatch
):
    programs: list[ResidentStep] = []
    made = ResidentStep._caller
    monkeypatch.setattr(ResidentStep, "_caller", lambda p: programs.append(p) or made(p))
    before = _held(device)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)
    model = to_device(nn.Sequential(*layers), "remote:3")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = compile_step(train, model=model, optimizer=optimizer)
    x = torch.randn(8, 64)
    for _ in range(2):  # the first one runs in eager
        step(x)
    losses = [step(x) for _ in range(10)]
    losses[-1].item()
    entries = [e for values in optimizer.state.values() for e in values.values()]
    state = sum(t.nbytes for t in (*model.parameters(), *entries))
    assert state > 350_000
    assert state <= _held(device) - before <= 1.01 * state
    (program,) = programs
    found = program.executable.get_compiled_memory_stats()
    assert found.alias_size_in_bytes == state  # written where it is
    peak = found.argument_size_in_bytes + found.temp_size_in_bytes
    peak += found.output_size_in_bytes - found.alias_size_in_bytes
    assert peak <= 1.1 * (state + found.temp_size_in_bytes)
