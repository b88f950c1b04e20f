"""How a step is compared: copies of what it writes over, and samples of large tensors."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import compile_step
from dynamo_backends.aot.step.program import copies, record_program, verified
from dynamo_backends.aot.step.program.copies import TensorBackups
from tests.verification.planted import Net, WrongStep
from tests.verification.test_planted import Step

TENSORS = {
    3: torch.randn(4, 6),
    5: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    7: torch.tensor(3),
    9: torch.randn(3, 4).t().bfloat16(),
    11: torch.empty(0, 4),
}


@pytest.mark.parametrize("in_memory", [1 << 20, 0])
def test_copies_are_what_was_there(in_memory: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies, "IN_MEMORY", in_memory)
    tensors = {i: t.clone() for i, t in TENSORS.items()}
    taken = TensorBackups(tensors)
    assert bool(taken._kept) == (in_memory > 0)
    for tensor in tensors.values():
        tensor.fill_(0)
    for _ in range(2):
        for i, found in taken.load().items():
            assert torch.equal(found, TENSORS[i])
            assert found.dtype == TENSORS[i].dtype
            assert found.stride() == TENSORS[i].stride()
    taken.close()


def test_where_no_file_can_be_written_copies_are_in_memory(monkeypatch: pytest.MonkeyPatch):
    def fail(**_: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(copies, "IN_MEMORY", 0)
    monkeypatch.setattr(copies.tempfile, "TemporaryFile", fail)
    taken = TensorBackups({0: torch.ones(3)})
    assert torch.equal(taken.load()[0], torch.ones(3))


@pytest.mark.plants_errors
def test_a_wrong_step_is_found_by_a_sample_and_undone_from_a_file(
    monkeypatch: pytest.MonkeyPatch,
):
    original = record_program.VerifiedStep

    def planted(program: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        return original(WrongStep(program, graph), graph, *args, **kwargs)

    monkeypatch.setattr(record_program, "VerifiedStep", planted)
    monkeypatch.setattr(copies, "IN_MEMORY", 0)
    monkeypatch.setattr(verified, "_KEPT", 128)
    ours = Step(Net(), 0.1, torch.optim.AdamW)
    theirs = Step(copy.deepcopy(ours.model), 0.1, torch.optim.AdamW)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    step = ours.compiled("ts_trace")
    for _ in range(2):
        torch.testing.assert_close(step(x, y), theirs(x, y).detach())
    ours_p: Tensor
    for ours_p, theirs_p in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(ours_p, theirs_p)
    assert step.eager_steps == 1, "the first step was undone and taken again by the graph in eager"


@pytest.mark.parametrize("size", [1e-19, 1e-20, 3e-21])
def test_an_optimizers_state_may_be_denormal(size: float):
    """Squares of small gradients: XLA computes zeros, which is no wrong result."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 300))
    model, optimizer = nn.ParameterList([parameter]), torch.optim.AdamW([parameter])

    def function(x: Tensor) -> Tensor:
        loss = (parameter * x * size).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = compile_step(function, model=model, optimizer=optimizer, backend="openxla")
    with dynamo_backends.record() as reports:
        for _ in range(3):
            step(torch.linspace(0.5, 2, 300))
    (report,) = reports
    assert report.verified == 1
    assert not report.runtime_fallbacks
    assert optimizer.state[parameter]["exp_avg_sq"].abs().max() < 1e-36
