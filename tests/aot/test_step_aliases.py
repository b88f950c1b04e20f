"""Tensors of a step that share memory: tied by `.data`, views of a flat parameter, closures."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends.interface.errors import StepCaptureError
from tests.aot import step_nets as nets
from tests.aot.step_checks import assert_one_program, compare

Made = tuple[Any, list[nn.Module], list[torch.optim.Optimizer]]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, **clear: Any) -> Any:
    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(**clear)
        return loss.detach()

    return function


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def tied(dtype: torch.dtype) -> Made:
    """One weight for two layers, the second transposed."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)
    model[2].weight.data = model[0].weight.data.T
    optimizer = sgd(model.parameters())
    return plain(model, optimizer), [model], [optimizer]


def flat(dtype: torch.dtype) -> Made:
    """All parameters, and their gradients, are parts of one that the optimizer updates."""
    model = nets.mlp().to(dtype)
    whole = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    whole.grad = torch.zeros_like(whole)
    start = 0
    for p in model.parameters():
        end = start + p.numel()
        p.data = whole.data[start:end].view_as(p)
        p.grad = whole.grad[start:end].view_as(p)
        start = end
    optimizer = sgd([whole])
    return plain(model, optimizer, set_to_none=False), [model], [optimizer]


class Overlapping(nn.Module):
    """A buffer that is a part of another, and both are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("all", torch.zeros(6))
        self.register_buffer("some", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x) + self.some
        with torch.no_grad():
            self.all.add_(1.0)
            self.some.mul_(0.5)
        return y + self.all[3:] * self.all[:3]


def buffers(dtype: torch.dtype) -> Made:
    model = Overlapping().to(dtype)
    model.some = model.all[1:6:2]
    optimizer = sgd(model.parameters())
    return plain(model, optimizer), [model], [optimizer]


def by_closure(dtype: torch.dtype) -> Made:
    """Parameters are read and written by other tensors on their memory, too."""
    model = nets.mlp().to(dtype)
    optimizer = sgd(model.parameters())
    values = dict(model.state_dict())
    first = model[0].weight.data

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + sum(v.square().sum() for v in values.values())
        loss.backward()
        optimizer.step()
        first.clamp_(-0.2, 0.2)
        optimizer.zero_grad()
        return loss.detach()

    return function, [model], [optimizer]


@pytest.mark.parametrize(
    ("build", "backend"),
    [
        *((build, "aot_eager") for build in (tied, flat, buffers, by_closure)),
        *((build, "openxla") for build in (tied, flat, buffers)),
        (tied, "inductor"),
    ],
)
def test_tensors_that_share_memory(build: Any, backend: str) -> None:
    step = compare(build, nets.rows(6), backend)
    assert_one_program(step, 6)


def test_memory_that_is_shared_no_longer() -> None:
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        function, [model], [optimizer] = tied(torch.float64)
        step = function
        if compiled:
            step = dynamo_backends.compile_step(
                function, model=model, optimizer=optimizer, backend="aot_eager"
            )
        for i, (x, y) in enumerate(nets.rows(6)):
            if i == 3:
                model[2].weight.data = model[2].weight.data.clone()
            step(x.double(), y)
        outcomes.append([p.detach() for p in model.parameters()])
    for eager, ours in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-9, atol=1e-12)
    assert (step.launches, step.compilations, step.eager_steps) == (5, 2, 1)


@pytest.mark.parametrize("fallback", ["error", "split"])
def test_memory_with_two_dtypes_is_in_no_program(fallback: str) -> None:
    model = nets.mlp()
    model.register_buffer("bits", model[0].weight.data.view(torch.int32))
    eager = copy.deepcopy(model)
    eager.bits = eager[0].weight.data.view(torch.int32)
    optimizer, eagers = sgd(model.parameters()), sgd(eager.parameters())
    function = plain(eager, eagers)
    step = dynamo_backends.compile_step(
        plain(model, optimizer),
        model=model,
        optimizer=optimizer,
        backend="aot_eager",
        fallback=fallback,
    )
    batches = nets.rows(3)
    torch.testing.assert_close(step(*batches[0]), function(*batches[0]))
    for batch in batches[1:]:
        if fallback == "error":
            names = r"model\.bits, model\.0\.weight share memory"
            with pytest.raises(StepCaptureError, match=names):
                step(*batch)
        else:
            torch.testing.assert_close(step(*batch), function(*batch))
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert (step.launches, step.eager_steps) == (0, 1 if fallback == "error" else 3)


def adds_in_place(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1.0)
    return (x * y).mean()


def reads(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).mean()


def batch_step(loss: Any, backend: str | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(x: Tensor, y: Tensor) -> Tensor:
        value = (model(x.clone()).mean() + 1) * loss(x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    if backend is None:
        return model, function
    return model, dynamo_backends.compile_step(
        function, model=model, optimizer=optimizer, backend=backend
    )


@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "inductor"])
@pytest.mark.parametrize("loss", [adds_in_place, reads])
def test_a_later_batch_may_have_one_tensor_twice(backend: str, loss: Any):
    (eager, function), (model, step) = batch_step(loss, None), batch_step(loss, backend)
    for turn in range(4):
        values = torch.randn(2, 3, 4, generator=torch.manual_seed(turn))
        theirs, ours = values.clone(), values.clone()
        pairs = [(t[0], t[0] if turn % 2 else t[1].clone()) for t in (theirs, ours)]
        twice = [(x, x) if turn % 2 else (x, y) for x, y in pairs]
        torch.testing.assert_close(step(*twice[1]), function(*twice[0]))
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(dict(model.named_parameters()), dict(eager.named_parameters()))
    assert (step.launches, step.recompiles, step.eager_steps) == (2, 1, 2)


def test_overlapping_arguments_may_be_read_but_not_written():
    (_, function), (_, step) = batch_step(reads, None), batch_step(reads, "openxla")
    memory = torch.randn(16)
    x, y = memory[:12].view(3, 4), memory[4:].view(3, 4)
    torch.testing.assert_close(step(x, y), function(x, y))
    model, step = batch_step(adds_in_place, "openxla")
    step(x.clone(), y.clone())
    before = memory.clone(), model.weight.detach().clone()  # type: ignore[operator]
    with pytest.raises(StepCaptureError, match=r"batch\[0\], batch\[1\] share storage"):
        step(x, y)
    torch.testing.assert_close((memory, model.weight.detach()), before)  # type: ignore[operator]
    step(memory[:8].view(2, 4), memory[8:].view(2, 4))  # parts of one tensor that do not overlap


@pytest.mark.parametrize("backend", ["openxla", "onnxrt"])
def test_gradients_of_an_argument_that_is_there_twice(backend: str):
    leaves = [torch.ones(3, 4, requires_grad=True) for _ in range(2)]
    runs = [batch_step(reads, None)[1], batch_step(reads, backend)[1]]
    for leaf, run in zip(leaves, runs, strict=True):
        for _ in range(2):
            run(leaf, leaf)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
