"""Every optimizer: ten compiled steps leave what ten eager steps leave."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.aot import step_nets as nets
from tests.aot.step_checks import (
    assert_as_accurate_as_eager,
    assert_equal_to_eager,
    assert_one_program,
)

optim = torch.optim


class Lion(optim.Optimizer):
    """Chen et al., 2023 (arXiv:2302.06675), as people write it, with state made in step."""

    def __init__(self, params: Any, lr: float, betas: Any = (0.9, 0.99), weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            lr = group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["average"] = torch.zeros_like(p)
                average = state["average"]
                if group["weight_decay"] != 0:
                    p.mul_(1 - lr * group["weight_decay"])
                p.add_((average * beta1 + p.grad * (1 - beta1)).sign(), alpha=-lr)
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def two_groups(parameters: Iterator[Tensor]) -> optim.Optimizer:
    first, *rest = parameters
    return optim.AdamW([{"params": [first], "lr": 0.03, "weight_decay": 0.0}, {"params": rest}])


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01, dtype=torch.float64)),
    "groups": two_groups,
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.05),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "lion": lambda p: Lion(p, lr=0.01),
}
ON_XLA = ("nesterov", "adadelta", "nadam", "radam", "rprop", "lion")


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "aot_eager") for name in OPTIMIZERS] + [(name, "openxla") for name in ON_XLA],
)
def test_ten_steps_equal_eagers(name: str, backend: str) -> None:
    step = assert_equal_to_eager(
        nets.mlp,
        OPTIMIZERS[name],
        nets.rows(10),
        backend,
        loss_of=nets.entropy,
        schedule=name not in ("tensor lr",),
    )
    # An optimizer that is not torch's makes its state by calls of its own.
    assert_one_program(step, 10, recorded=2 if name == "lion" else 1)


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_inductor_in_float32(name: str) -> None:
    step = assert_as_accurate_as_eager(
        nets.mlp, OPTIMIZERS[name], nets.rows(10), "inductor", loss_of=nets.entropy, schedule=True
    )
    assert_one_program(step, 10)


@pytest.mark.parametrize("backend", ["inductor", "inductor_freezing", "ts_trace", "openxla"])
def test_onednns_lstm_is_trained(backend: str) -> None:
    """Its gradient reads a workspace, which there is only in grad mode."""
    step = assert_as_accurate_as_eager(
        lambda: nn.LSTM(8, 8), OPTIMIZERS["adamw"], list(torch.randn(3, 1, 2, 5, 8)), backend
    )
    assert_one_program(step, 3)


def test_a_hundred_steps_of_a_schedule_without_recompilation() -> None:
    step = assert_equal_to_eager(
        nets.mlp,
        OPTIMIZERS["adamw"],
        nets.rows(100),
        "openxla",
        loss_of=nets.entropy,
        schedule=True,
    )
    assert_one_program(step, 100)


def test_number_that_code_asks_for_is_compiled_anew_when_the_answer_changes() -> None:
    for backend in (None, "aot_eager"):
        found = []
        torch.manual_seed(0)
        model = nets.mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.0, weight_decay=0.0)
        step = stepper(model, optimizer, backend)
        for i, batch in enumerate(nets.rows(8)):
            if i == 4:
                optimizer.param_groups[0]["weight_decay"] = 0.5
            found.append(step(*batch))
        if backend is None:
            expected = found
        else:
            torch.testing.assert_close(found, expected)
            assert (step.compilations, step.eager_steps, step.launches) == (2, 1, 7)
            assert step.refusals == {}


def stepper(model: Any, optimizer: optim.Optimizer, backend: str | None, **settings: Any) -> Any:
    import dynamo_backends

    def function(inputs: Tensor, classes: Tensor) -> Tensor:
        loss = nets.entropy(model, (inputs, classes))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if backend is None:
        return function
    return dynamo_backends.compile_step(
        function, model=model, optimizer=optimizer, backend=backend, **settings
    )
