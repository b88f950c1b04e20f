"""LSTM layers: one loop in each direction, with one product in it."""

from typing import Any

import pytest
import torch
from jax.extend import core
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.xla import steps
from tests.aot.step_checks import assert_as_accurate_as_eager, assert_one_program
from tests.rotation import long_if
from tests.training.stepping import OPTIMIZERS

TIME, BATCH, FEATURES, HIDDEN = 7, 3, 5, 6


def sequences(count: int) -> list[Any]:
    torch.manual_seed(3)
    return [(torch.randn(TIME, BATCH, FEATURES),) for _ in range(count)]


class Net(nn.Module):
    """Learns its first states, so that these have gradients."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN, **settings)
        directions = self.lstm.num_layers * (2 if self.lstm.bidirectional else 1)
        self.first = nn.Parameter(torch.randn(2, directions, 1, HIDDEN) / 3)
        self.before = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Any:
        h, c = self.first.expand(2, -1, BATCH, -1)
        return self.lstm(self.before(x), (h.contiguous(), c.contiguous()))


def everything(model: nn.Module, batch: Any) -> Tensor:
    outputs, (h, c) = model(*batch)
    return outputs.square().mean() + (h * c).sum() / 10 + c.square().mean()


def last_cells(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(*batch)[1][1].square().mean()
    return loss


@pytest.mark.parametrize(
    ("settings", "loss_of"),
    [
        pytest.param({}, everything, id="plain"),
        pytest.param({}, last_cells, id="plain, last cells"),
        long_if(True, {"bias": False}, everything, id="no bias"),
        pytest.param({"bias": False}, last_cells, id="no bias, last cells"),
        pytest.param({"num_layers": 2, "bidirectional": True}, everything, id="two layers"),
        long_if(
            True, {"num_layers": 2, "bidirectional": True}, last_cells, id="two layers, last cells"
        ),
    ],
)
def test_training_is_as_accurate_as_eagers(settings: dict[str, Any], loss_of: Any) -> None:
    step = assert_as_accurate_as_eager(
        lambda: Net(**settings), OPTIMIZERS["sgd"], sequences(3), "openxla", loss_of=loss_of,
        options={"cache": False},
    )  # fmt: skip
    assert_one_program(step, 3)


def test_loops_hold_one_product_each(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[core.ClosedJaxpr] = []
    fold = steps.simplify_products

    def spy(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
        programs.append(program)
        return fold(program)

    monkeypatch.setattr(steps, "simplify_products", spy)
    model = nn.LSTM(FEATURES, HIDDEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(x: Tensor) -> Tensor:
        loss = model(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = dynamo_backends.compile_step(
        function, model=model, optimizer=optimizer, options={"cache": False}
    )
    for _ in range(2):  # the first one runs in eager
        step(torch.randn(TIME, BATCH, FEATURES))
    loops = [e for e in equations(programs[0].jaxpr) if e.primitive.name == "scan"]
    assert [e.params["length"] for e in loops] == [TIME, TIME], "one forward and one backward"
    for loop in loops:
        inside = [e.primitive.name for e in equations(loop.params["jaxpr"].jaxpr)]
        assert inside.count("dot_general") == 1
        sizes = [v.aval.size for v in loop.params["jaxpr"].jaxpr.outvars]
        assert max(sizes) == BATCH * 4 * HIDDEN, "no gradient of a weight is added up in the loop"


def equations(jaxpr: Any) -> list[Any]:
    """All equations, those of functions that are called too, but not those of loops."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        inner = equation.params.get("jaxpr")
        if inner is not None and equation.primitive.name != "scan":
            found += equations(getattr(inner, "jaxpr", inner))
    return found
