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
    # The first update copies; all others have one graph in common.
    assert (step.compilations, step.launches) == (2, 5)
    assert step.reasons == ["a number that the step asks for (such as weight_decay != 0) changed"]


def test_a_counter_that_was_written_to_cannot_be_asked() -> None:
    model = torch.nn.Linear(4, 3)
    model.register_buffer("count", torch.tensor(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = nets.entropy(model, (x, y))
        loss.backward()
        optimizer.step()
        model.count.detach().add_(1)
        return loss * 2 if model.count > 1 else loss

    step = dynamo_backends.compile_step(function, model=model, optimizer=optimizer)
    with pytest.raises(dynamo_backends.StepCaptureError, match=r"reads a value out of a tensor"):
        step(*nets.rows(1)[0])


def lbfgs(fallback: Any) -> tuple[Any, list[Tensor]]:
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
    if fallback:
        step = dynamo_backends.compile_step(
            function, model=model, optimizer=optimizer, backend="aot_eager", fallback=fallback
        )
    return step, [step(x.double(), y).detach() for x, y in nets.rows(3)]


def test_lbfgs_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        dynamo_backends.StepCaptureError, match=r"LBFGS calls the model several"
    ) as e:
        lbfgs("error")
    assert 'fallback="split"' in str(e.value)


# Said by Dynamo about itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_lbfgs_in_parts() -> None:
    step, losses = lbfgs("split")
    assert step.is_split
    torch.testing.assert_close(losses, lbfgs(None)[1], rtol=1e-9, atol=1e-12)
