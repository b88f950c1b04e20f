"""Trains twice, in eager and by replay, and compares all that a training loop can see."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dynamo_backends import compile_step
from dynamo_backends.aot.step.record.placeholders import Placeholder

TOLERANCE = 1e-9

STEPS = 8
"""The steps of a loop of `trains`."""


def network() -> nn.Module:
    """Two layers, in float64."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def batches(i: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Five rows and their classes."""
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (5,), generator=generator)


@dataclass
class Run:
    """A training loop and its Python state.

    Attributes:
        model: What is trained.
        optimizer: Of its parameters.
        state: Whatever the loop reads and writes; compared afterwards.
        between: Called after each step with its number.
        optimizers: Further ones.
    """

    model: Any
    optimizer: Any
    state: SimpleNamespace = field(default_factory=SimpleNamespace)
    between: Callable[[int], None] = lambda i: None
    optimizers: list[Any] = field(default_factory=list)


Loop = Callable[[Run], Callable[..., Any]]


def update(run: Run, loss: Tensor) -> Tensor:
    """Updates the parameters by a loss."""
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def update_by_gradients(run: Run, loss: Tensor) -> Tensor:
    """Updates the parameters by gradients that `torch.autograd.grad` returns."""
    parameters = list(run.model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


@dataclass
class Case:
    """A loop with what it needs.

    Attributes:
        loop: From a run to its step function.
        model: Makes the model.
        optimizer: Makes the optimizer.
        batch: Makes the arguments of a step.
        steps: How many.
        eager: Whether a part of it runs in eager.
        most_eager: How many of its steps may be recorded.
        settings: Of `compile_step`.
    """

    loop: Loop
    model: Callable[[], Any] = network
    optimizer: Callable[[Any], Any] = momentum
    batch: Callable[[int, torch.Generator], tuple[Any, ...]] = batches
    steps: int = 6
    eager: bool = False
    most_eager: int = 3
    settings: dict[str, Any] = field(default_factory=dict)


def run(case: Case, backend: str | None) -> tuple[Run, dict[str, Any], Any]:
    """Runs a loop: what it leaves, and its step."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    model = case.model()
    this = Run(model, case.optimizer(model.parameters()))
    function = step = case.loop(this)
    if backend is not None:
        step = compile_step(
            function, model=[this.model], optimizer=[this.optimizer, *this.optimizers],
            backend=backend, **{"python": "replay", "fallback": "split"} | case.settings,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    left: dict[str, Any] = {}
    for i in range(case.steps):
        left[f"result {i}"] = copied(step(*case.batch(i, generator)))
        left[f"gradients after {i}"] = [copied(p.grad) for p in model.parameters()]
        this.between(i)
    left["model"] = copied(dict(model.state_dict()))
    left["optimizers"] = [copied(o.state_dict()) for o in (this.optimizer, *this.optimizers)]
    left["state"] = copied(vars(this.state))
    left["random"] = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    return this, left, step


def copied(value: Any) -> Any:
    """A value without history, and of plain classes."""
    if isinstance(value, Tensor):
        assert type(value) is not Placeholder, "a placeholder has escaped"
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [copied(v) for v in value]
    if isinstance(value, SimpleNamespace) or is_dataclass(value):
        return copied(vars(value))
    return copy.copy(value) if isinstance(value, set | frozenset | numpy.ndarray) else value


def assert_equal(case: Case, backend: str = "aot_eager") -> Any:
    """Compares a loop with eager; returns its step."""
    _, expected, _ = run(case, None)
    _, found, step = run(case, backend)
    compare("left", found, expected)
    if not case.eager:
        assert not step.refusals, step.refusals
        assert step.eager_steps <= case.most_eager, step.divergences
    return step


def compare(name: str, found: Any, expected: Any) -> None:
    """Compares two values, element by element."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), f"{name}: {found!r} instead of {expected!r}"
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        if found.layout is torch.strided and not found.is_floating_point():
            assert torch.equal(found, expected), f"{name}: {found} instead of {expected}"
        else:
            torch.testing.assert_close(
                found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True,
                msg=lambda text: f"{name}: {text}",
            )  # fmt: skip
    elif isinstance(expected, dict):
        assert list(found) == list(expected), f"{name}: {list(found)} instead of {list(expected)}"
        for key, value in expected.items():
            compare(f"{name}[{key!r}]", found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{name}: {found} instead of {expected}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            compare(f"{name}[{i}]", a, b)
    elif isinstance(expected, float):
        assert isinstance(found, float), f"{name}: {found!r} instead of {expected!r}"
        assert abs(found - expected) <= TOLERANCE * max(1, abs(expected)) or (
            found != found and expected != expected
        ), f"{name}: {found!r} instead of {expected!r}"
    elif isinstance(expected, numpy.ndarray):
        numpy.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    else:
        assert type(found) is type(expected), f"{name}: {found!r} instead of {expected!r}"
        assert found == expected, f"{name}: {found!r} instead of {expected!r}"


def trains(loop: Loop, backend: str = "openxla", ways: int = 1, **settings: Any) -> Any:
    """Compares a loop with eager; the calls that go no new way run programs.

    Args:
        loop: From a run to its step function.
        backend: What compiles it.
        ways: How many the loop goes.
        settings: Of the case.

    Returns:
        Its step.
    """
    steps = settings.pop("steps", STEPS)
    step = assert_equal(Case(loop, steps=steps, most_eager=ways, **settings), backend)
    assert step.launches >= steps - ways > 0, (step.launches, step.eager_steps)
    return step
