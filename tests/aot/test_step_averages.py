"""Averages of weights by torch's own class, and the optimizer that no graph can hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import swa_utils

import dynamo_backends
from tests.aot import step_nets as nets
from tests.aot.step_checks import assert_close

AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean of lists": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "ema of lists": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "buffers too": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


def trained(settings: dict[str, Any], backend: str | None, steps: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nets.convnet().double()
    average = swa_utils.AveragedModel(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = nets.entropy(model, (x, y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss.detach()

    step: Callable[..., Any] = function
    if backend is not None:
        step = dynamo_backends.compile_step(
            function, model=[model, average], optimizer=optimizer, backend=backend
        )
    torch.manual_seed(1)
    losses = [step(x.double(), y) for x, y in nets.images(steps)]
    return losses, average, step


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "aot_eager") for name in AVERAGES] + [("mean", "openxla"), ("ema of lists", "openxla")],
)
def test_averaged_models(name: str, backend: str) -> None:
    expected, eager, _ = trained(AVERAGES[name], None, 5)
    losses, average, step = trained(AVERAGES[name], backend, 5)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)
    for key, value in eager.state_dict().items():
        assert_close(key, value, average.state_dict()[key])
    assert average.n_averaged == 5
    # The first update copies; the counter is read behind the optimizer's step, at a cut.
    assert step.eager_steps == 2
    assert step.cuts > 0
    assert step.launches >= 2 * (5 - step.eager_steps)
    assert step.refusals == {}


def test_a_counter_that_was_written_to_is_read_at_a_cut() -> None:
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).double()
        model.register_buffer("count", torch.tensor(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def function(
            x: Tensor, y: Tensor, model: Any = model, optimizer: Any = optimizer
        ) -> Tensor:
            loss = nets.entropy(model, (x, y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.count.detach().add_(1)
            return (loss * 2 if model.count > 2 else loss).detach()

        step: Any = function
        if compiled:
            step = dynamo_backends.compile_step(function, model=model, optimizer=optimizer)
        outcomes.append([step(x.double(), y) for x, y in nets.rows(5)])
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-9, atol=1e-12)
    assert (step.cuts, step.refusals) == (1, {})
    assert step.launches >= 6


def lbfgs(is_compiled: bool) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model = nets.mlp().double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def function(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nets.entropy(model, (x, y))
            loss.backward()
            return loss

        return optimizer.step(closure)

    step: Any = function
    if is_compiled:
        step = dynamo_backends.compile_step(
            function, model=model, optimizer=optimizer, backend="aot_eager"
        )
    return step, [step(x.double(), y).detach() for x, y in nets.rows(6)]


def test_lbfgs_is_followed_call_by_call() -> None:
    step, losses = lbfgs(is_compiled=True)
    torch.testing.assert_close(losses, lbfgs(is_compiled=False)[1], rtol=1e-9, atol=1e-12)
    assert step.launches > 0
    assert step.refusals == {}
