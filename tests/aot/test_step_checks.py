"""Positions out of range, and what a step asserts: eager's error, and nothing has changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
from torch import Tensor, nn
from torch.nn import functional as F

from dynamo_backends import compile_step
from tests.backend_checks import usable

BACKENDS = ("openxla", "inductor", "onnxrt")

Loss = Callable[[Tensor, Tensor], Tensor]


def one_hot(scores: Tensor, y: Tensor) -> Tensor:
    return -(scores.log_softmax(-1) * F.one_hot(y, 3)).sum()


def computed_positions(scores: Tensor, y: Tensor) -> Tensor:
    """What follows from the scores decides where is read: known in the middle of a step only."""
    return scores.gather(1, scores.detach().abs().round().long().clamp(max=2)[:, :1] + y[:, None])


def asserted(scores: Tensor, y: Tensor) -> Tensor:
    """An assertion on what the step computes."""
    torch.ops.aten._assert_async.msg((scores.detach() < 1e3).all(), "scores are too large")
    return F.cross_entropy(scores, y)


def normal(scores: Tensor, y: Tensor) -> Tensor:
    return -D.Normal(scores[:, 0], scores[:, 1].exp(), validate_args=True).log_prob(y.float())


def categorical(scores: Tensor, y: Tensor) -> Tensor:
    return -D.Categorical(logits=scores, validate_args=True).log_prob(y)


RIGHT, X = torch.tensor([0, 2, 1]), torch.ones(3, 4)

CASES: dict[str, tuple[Loss, Tensor, Tensor, type[Exception]]] = {
    "a label too large": (F.cross_entropy, X, torch.tensor([0, 2, 3]), IndexError),
    "a label below zero": (F.cross_entropy, X, torch.tensor([0, 2, -1]), IndexError),
    "one_hot, too large": (one_hot, X, torch.tensor([0, 2, 3]), RuntimeError),
    "one_hot, below zero": (one_hot, X, torch.tensor([0, -2, 1]), RuntimeError),
    "a computed position": (computed_positions, X, torch.tensor([0, 2, 7]), RuntimeError),
    "an assertion": (asserted, X * 1e8, RIGHT, RuntimeError),
    "a parameter of a distribution": (normal, X * torch.nan, RIGHT, ValueError),
    "a value of a distribution": (categorical, X, torch.tensor([0, 2, 5]), ValueError),
}


def trained(loss: Loss, backend: str | None) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def function(x: Tensor, y: Tensor) -> Tensor:
        value = loss(model(x) * (1 + x[:, :1].abs()), y).mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    if backend is None:
        return model, optimizer, function
    fallback = "split" if backend == "ov" else "error"
    step = compile_step(
        function, model=model, optimizer=optimizer, backend=backend, fallback=fallback
    )
    return model, optimizer, step


@pytest.mark.parametrize("case", CASES)
def test_a_step_in_parts_leaves_what_eager_leaves(case: str):
    """OpenVINO takes no whole steps. What came before the error has happened, as in eager."""
    loss, bad_x, bad_y, kind = CASES[case]
    theirs, _, eager = trained(loss, None)
    ours, _, step = trained(loss, usable("ov"))
    good = torch.randn(3, 4).clamp(-0.2, 0.2)
    for _ in range(2):
        torch.testing.assert_close(step(good, RIGHT * 0), eager(good, RIGHT * 0))
        with pytest.raises(kind) as expected:
            eager(bad_x, bad_y)
        with pytest.raises(kind) as found:
            step(bad_x, bad_y)
        assert str(found.value).split("\n")[0] == str(expected.value).split("\n")[0]
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), equal_nan=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_eager_refuses(backend: str, case: str):
    """It changes nothing; with a value that Python needs, all before the error has happened."""
    loss, bad_x, bad_y, kind = CASES[case]
    theirs, _, eager = trained(loss, None)
    model, optimizer, step = trained(loss, backend)
    good = torch.randn(3, 4).clamp(-0.2, 0.2)
    torch.testing.assert_close(step(good, RIGHT * 0), eager(good, RIGHT * 0))
    for _ in range(2):
        torch.testing.assert_close(step(good, RIGHT * 0), eager(good, RIGHT * 0))
        statistics = copy.deepcopy(theirs[1].state_dict())
        with pytest.raises(kind) as expected:
            eager(bad_x, bad_y)
        if not step.cuts:
            theirs[1].load_state_dict(statistics)
        before = copy.deepcopy((dict(model.named_parameters()), optimizer.state_dict()["state"]))
        with pytest.raises(kind) as found:
            step(bad_x, bad_y)
        assert str(found.value).split("\n")[0] == str(expected.value).split("\n")[0]
        after = (dict(model.named_parameters()), optimizer.state_dict()["state"])
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        torch.testing.assert_close(model.state_dict(), theirs.state_dict(), equal_nan=True)
        assert all(p.grad is None for p in model.parameters())
        nn.Module.load_state_dict(model[1], statistics)
        theirs[1].load_state_dict(statistics)
    assert step.refusals == {}
    assert case.endswith("distribution") or (step.recompiles, step.cuts) == (0, 0)
    assert step.launches >= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_step_may_be_one_that_eager_refuses(backend: str):
    _, _, eager = trained(F.cross_entropy, None)
    _, _, step = trained(F.cross_entropy, backend)
    with pytest.raises(IndexError, match="Target 3 is out of bounds"):
        step(X, torch.tensor([0, 1, 3]))
    torch.testing.assert_close(step(X, RIGHT), eager(X, RIGHT))
    ignored = torch.tensor([0, -100, 1])
    torch.testing.assert_close(step(X, ignored), eager(X, ignored))


def test_rows_of_a_table():
    """An embedding reads and its gradient writes where the batch says."""
    model = nn.Embedding(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = compile_step(function, model=model, optimizer=optimizer, backend="openxla")
    step(torch.tensor([0, 4]))
    before = model.weight.detach().clone()
    for bad in (5, -1, 1 << 40):
        with pytest.raises(IndexError, match="index out of range in self"):
            step(torch.tensor([0, bad]))
    assert torch.equal(model.weight, before)
