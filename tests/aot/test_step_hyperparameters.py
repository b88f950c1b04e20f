"""Hyper-parameters that change in the middle of training mean what eager makes of them.

Models train in eager and compiled, in float64. In each round every number of an optimizer is of
another type; in the end each has been of all. Where eager raises, the compiled step raises, too.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from dynamo_backends import compile_step
from dynamo_backends.aot.step.state.hyperparameters import replace

optim = torch.optim

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5, weight_decay=0.01),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.05, eps=(1e-6, 1e-3)),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.01, eps=1e-8),
    "adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "adamax": lambda p: optim.Adamax(p, lr=0.01, weight_decay=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.05, t0=2.0, weight_decay=0.01),
    "muon": lambda p: optim.Muon(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: optim.RAdam(p, lr=0.01, weight_decay=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, weight_decay=0.01),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}

VALUES: dict[str, Callable[[float], Any]] = {
    "float": lambda x: 0.9 * x,
    "zero": lambda _: 0,
    "integer": lambda _: 1,
    "tensor": lambda x: torch.tensor(0.9 * x, dtype=torch.float64),
    "other tensor": lambda x: torch.tensor(0.7 * x, dtype=torch.float64),
    "numpy.float64": lambda x: numpy.float64(0.8 * x),
    "numpy.int64": lambda _: numpy.int64(0),
    "flag": lambda _: True,
}

# One rounding to float32 more or less shows, as eager and a graph take powers by other kernels.
ROUNDED: dict[str, Callable[[float], Any]] = {
    "float": lambda x: 0.9 * x,
    "tensor": lambda x: torch.tensor(0.8 * x, dtype=torch.float32),
    "other tensor": lambda x: torch.tensor(0.7 * x, dtype=torch.float32),
    "numpy.float32": lambda x: numpy.float32(0.7 * x),
}

# 1 is no rate of decay: 1 - beta ** step is 0, and eager divides by it. Muon's coefficients are
# such that the iteration does not diverge, and Adafactor's first epsilon keeps 0 from dividing.
_INTEGERS = ("integer", "flag")
SKIPPED: dict[str, tuple[str, ...]] = {
    "betas": _INTEGERS,
    "momentum_decay": _INTEGERS,
    "eps[0]": ("zero", "numpy.int64"),
    "ns_coefficients": ("zero", "numpy.int64", *_INTEGERS),
}


class Training:
    """A model with an optimizer, and a function that takes a step."""

    def __init__(self, make: Callable[[Any], optim.Optimizer], backend: str | None, **options: Any):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3, bias=False).double()
        self.optimizer = make(self.model.parameters())
        self.step: Any = self.function
        if backend is not None:
            self.step = compile_step(
                self.function,
                model=self.model,
                optimizer=self.optimizer,
                backend=backend,
                options=options or None,
            )

    def function(self, x: Tensor) -> Tensor:
        loss = (self.model(x) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def set(self, key: str, index: int | None, value: Any) -> None:
        replace(self.optimizer.param_groups[0], key, index, value)

    def everything(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        tensors = [t for s in state.values() for t in s.values() if isinstance(t, Tensor)]
        return copy.deepcopy([*self.model.state_dict().values(), *tensors])


def numbers(optimizer: optim.Optimizer) -> Iterator[tuple[str, int | None, float]]:
    """Each number of an optimizer that is no flag."""
    for key, value in optimizer.param_groups[0].items():
        for index, element in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if isinstance(element, int | float) and not isinstance(element, bool):
                yield key, index, element


def assert_equal(expected: Training, found: Training, tolerance: float, context: str) -> None:
    for e, f in zip(expected.everything(), found.everything(), strict=True):
        assert e.dtype == f.dtype, context
        torch.testing.assert_close(
            f, e, rtol=tolerance, atol=tolerance * 1e-3, msg=lambda m: f"{context}: {m}"
        )


def raises(training: Training, batch: Tensor) -> bool:
    """Whether a step in eager raises; the training stays what it is."""
    copied = Training.__new__(Training)
    copied.model, copied.optimizer = copy.deepcopy((training.model, training.optimizer))
    try:
        copied.function(batch)
    except Exception:
        return True
    return False


def check(
    make: Callable[[Any], optim.Optimizer],
    backend: str,
    values: dict[str, Callable[[float], Any]],
    tolerance: float,
) -> dict[str, list[str]]:
    """Trains with all values of all numbers.

    Returns:
        By number, the types that eager does not take.
    """
    eager, ours = Training(make, None), Training(make, backend)
    defaults = list(numbers(eager.optimizer))
    batches = torch.randn(len(values) + 1, 5, 4, dtype=torch.float64).unbind()
    for training in (eager, ours):
        training.step(batches[-1])
    refused: dict[str, list[str]] = {}
    names = list(values)
    for number, batch in enumerate(batches[:-1]):
        for i, (key, index, default) in enumerate(defaults):
            name = names[(number + i) % len(names)]
            if name in SKIPPED.get(key, ()) + SKIPPED.get(f"{key}[{index}]", ()):
                continue
            value = values[name](default or 0.1)
            eager.set(key, index, value)
            if raises(eager, batch):
                refused.setdefault(f"{key}[{index}]", []).append(name)
                value = default
                eager.set(key, index, value)
            ours.set(key, index, value)
        context = f"round {number}: {eager.optimizer}"
        expected, found = eager.step(batch), ours.step(batch)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, msg=context)
        assert_equal(eager, ours, tolerance, context)
    return refused


# What eager refuses: a flag or a numpy scalar as `alpha`, `value` or exponent.
REFUSED = {"flag", "numpy.float32", "numpy.float64"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_number_of_any_type(name: str) -> None:
    torch.manual_seed(0)
    refused = check(OPTIMIZERS[name], "aot_eager", VALUES, 1e-9)
    refused.pop("ns_steps[None]", None)  # a number of steps is an integer
    refused.pop("d[None]", None)  # eager divides by it
    assert REFUSED.issuperset(itertools.chain(*refused.values()))


@pytest.mark.parametrize("name", ["adadelta", "adafactor", "adam", "radam", "sgd"])
def test_numbers_of_float32(name: str) -> None:
    torch.manual_seed(0)
    assert check(OPTIMIZERS[name], "aot_eager", ROUNDED, 1e-6) == {}


def trained(
    key: str,
    values: list[Any],
    make: Callable[[Any], optim.Optimizer] = OPTIMIZERS["sgd"],
    backend: str = "aot_eager",
) -> Any:
    """Trains with these values in turn, in eager and compiled; returns the compiled step."""
    eager, ours = Training(make, None), Training(make, backend)
    batch = torch.ones(5, 4, dtype=torch.float64)
    for value in values:
        for training in (eager, ours):
            training.set(key, None, value)
            training.step(batch)
        assert_equal(eager, ours, 1e-9, f"{key} = {value}")
    return ours.step


def test_a_schedule_of_any_type_compiles_once_for_each_kind() -> None:
    assert trained("lr", [0.1, 1, 0, 0.3, 2]).compilations == 1
    assert trained("lr", [numpy.float64(x) for x in (0.1, 1, 0, 0.3)]).compilations == 1
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (0.1, 1.0, 0.0, 0.3)]
    assert trained("lr", tensors).compilations == 1


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_other_types_on_xla(name: str) -> None:
    tensor = torch.tensor(0.1, dtype=torch.float64)
    values = [0.1, 0, tensor, tensor.clone(), numpy.float64(0.1), numpy.float64(0.2)]
    step = trained("lr", values, OPTIMIZERS[name], "openxla")
    assert (step.launches, step.compilations, step.eager_steps) == (3, 3, 3)


@pytest.mark.long
def test_other_types_on_inductor() -> None:
    assert trained("lr", [0.1, 0], OPTIMIZERS["adafactor"], "inductor").compilations == 1


def test_a_decay_that_becomes_zero_is_asked_for() -> None:
    for kind in (float, numpy.float64, torch.tensor):
        step = trained("weight_decay", [kind(0.1), kind(0.3), kind(0.0), kind(0.2), 0, 0])
        assert step.compilations == (2 if kind is float else 3)
        assert step.eager_steps == (1 if kind is float else 2)
        assert step.launches == 6 - step.eager_steps


def test_a_tensor_that_is_written_to() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    assert trained("lr", [lr, lr.mul_(0.5), lr.fill_(0.0), lr.fill_(0.3)]).compilations == 1


def test_a_division_by_zero_raises_as_in_eager() -> None:
    training = Training(OPTIMIZERS["adafactor"], "aot_eager")
    batch = torch.ones(5, 4, dtype=torch.float64)
    for _ in range(2):
        training.step(batch)
    training.set("d", None, 0.0)
    for step in (training.function, training.step):
        with pytest.raises(ZeroDivisionError):
            step(batch)
    training.optimizer.zero_grad()
    eager = copy.copy(training)
    eager.model, eager.optimizer = copy.deepcopy((training.model, training.optimizer))
    for each in (training, eager):
        each.set("d", None, 1.0)
    for _ in range(2):
        training.step(batch)
        eager.function(batch)
    assert_equal(eager, training, 1e-9, "d is 1 again")


def test_a_number_changed_in_the_step() -> None:
    class Changing(Training):
        def function(self, x: Tensor) -> Tensor:
            loss = super().function(x)
            self.optimizer.param_groups[0]["lr"] *= 0.5
            return loss

    eager = Changing(OPTIMIZERS["nesterov"], None)
    ours = Changing(OPTIMIZERS["nesterov"], "aot_eager")
    for _ in range(3):
        for training in (eager, ours):
            training.step(torch.ones(5, 4, dtype=torch.float64))
    assert_equal(eager, ours, 1e-9, "lr *= 0.5")
    assert ours.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"] == 0.0125


class InPlace(optim.SGD):
    """Changes a number that it has read, as Python allows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                rate = group["lr"]
                rate *= 0.5
                rate += group["weight_decay"]
                p.add_(p.grad, alpha=-rate)


def test_numbers_are_not_changed_in_place() -> None:
    def make(parameters: Any) -> optim.Optimizer:
        (p,) = parameters
        return InPlace([p, nn.Parameter(torch.zeros_like(p))], lr=0.1, weight_decay=0.01)

    class Twice(Training):
        def function(self, x: Tensor) -> Tensor:
            first, second = self.optimizer.param_groups[0]["params"]
            loss = (x @ (first + second).t() - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

    eager, ours = Twice(make, None), Twice(make, "aot_eager")
    for _ in range(2):
        for training in (eager, ours):
            training.step(torch.ones(5, 4, dtype=torch.float64))
    assert_equal(eager, ours, 1e-9, "in place")
    second = [t.optimizer.param_groups[0]["params"][1] for t in (eager, ours)]
    torch.testing.assert_close(second[1], second[0])


@pytest.mark.parametrize("number", [0.5, numpy.float64(0.5)])
def test_a_number_does_not_widen_a_loss(number: float) -> None:
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def function(x: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean() * weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, torch.tensor(3) * weight

    step = compile_step(function, model=model, optimizer=optimizer, backend="aot_eager")
    assert [t.dtype for t in step(torch.ones(2, 4), number)] == [torch.float32] * 2


def test_a_summand_is_scaled_in_the_dtype_of_the_sum() -> None:
    """As Muon's updates are, which are of bfloat16."""
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = optim.SGD([p], lr=0.1)

    def function(x: Tensor) -> None:
        with torch.no_grad():
            p.add_(x.bfloat16(), alpha=optimizer.param_groups[0]["lr"])

    model = nn.ParameterList([p])
    step = compile_step(function, model=model, optimizer=optimizer, backend="aot_eager")
    x = torch.tensor([1.1, 2.2, 3.3])
    expected = p.detach().clone().add_(x.bfloat16(), alpha=0.1)
    step(x)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=0)
