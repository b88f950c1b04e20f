"""Steps by replay that take their batch in parts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynamo_backends import compile_step
from tests.aot.record.checks import compare, momentum, network


def returns_metrics(model: Any, optimizer: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), scores.abs().sum(), loss.detach().reshape(()), [loss, "done"]

    return step


@pytest.mark.parametrize("backend", ["aot_eager", "openxla"])
def test_results_that_are_no_loss_are_those_of_the_last_part(backend: str):
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    torch.manual_seed(0)
    model, reference = network(), network()
    model.load_state_dict(reference.state_dict())
    optimizer, expected = momentum(model.parameters()), momentum(reference.parameters())
    step = compile_step(
        returns_metrics(model, optimizer), model=model, optimizer=optimizer, accumulate=3,
        python="replay", backend=backend,
    )  # fmt: skip
    for _ in range(4):
        losses = []
        for part in range(3):
            scores = reference(x[2 * part : 2 * part + 2])
            losses.append(F.cross_entropy(scores, y[2 * part : 2 * part + 2]))
            (losses[-1] / 3).backward()
        expected.step()
        expected.zero_grad()
        mean = torch.stack(losses).mean().detach()
        compare("result", list(step(x, y)), [mean, scores.abs().sum(), mean, [mean, "done"]])
        compare("model", dict(model.state_dict()), dict(reference.state_dict()))
    assert (step.eager_steps, step.launches, step.cuts) == (1, 3, 0)
