"""Training loops that are run twice, in eager and by `compile_step`, and compared in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends import Step, compile_step

TOLERANCE = 1e-9


@dataclass
class World:
    """What a loop has: a model, an optimizer, and whatever the step function reads and writes.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        step: What takes a step: the function, or what was compiled of it.
        function: The function.
        data: Anything else.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Any = None
    function: Any = None
    data: SimpleNamespace = field(default_factory=SimpleNamespace)

    def update(self, loss: Tensor) -> Tensor:
        """Backward, the optimizer's step, and gradients thrown away."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The model's loss."""
        return F.cross_entropy(self.model(x), y)


Make = Callable[[World], Callable[..., Any]]
Between = Callable[[World, int], None]


def network() -> nn.Sequential:
    """Two layers, in float64."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def run(
    make: Make,
    between: Between | None,
    backend: str | None,
    steps: int,
    model: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    batch: Callable[[int, torch.Generator], tuple[Any, ...]],
) -> tuple[World, dict[str, Any]]:
    """Runs a loop; returns what it leaves behind.

    Args:
        make: From the world to the step function.
        between: Called after each step, with its number.
        backend: Of `compile_step`; None: in eager.
        steps: How many.
        model: Makes the model.
        optimizer: Makes the optimizer of its parameters.
        batch: Makes the arguments of a step.
    """
    torch.manual_seed(0)
    net = model()
    world = World(net, optimizer(net.parameters()))
    world.function = world.step = make(world)
    if backend is not None:
        world.step = compile_step(
            world.function, model=net, optimizer=world.optimizer, backend=backend
        )
    generator = torch.Generator().manual_seed(1)
    left: dict[str, Any] = {}
    for i in range(steps):
        result = world.step(*batch(i, generator))
        left |= {f"result {i}": result.detach().clone() if torch.is_tensor(result) else result}
        if between is not None:
            between(world, i)
    left |= {f"value of {k}": v.clone() for k, v in net.state_dict().items()}
    left |= {f"gradient of {k}": p.grad for k, p in net.named_parameters()}
    for number, state in world.optimizer.state_dict()["state"].items():
        left |= {f"{k} of {number}": v for k, v in state.items()}
    left["groups"] = [
        {k: v for k, v in g.items() if k != "params"} for g in world.optimizer.param_groups
    ]
    left |= {f"data {k}": v for k, v in vars(world.data).items() if _is_plain(v)}
    return world, left


def batches(i: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Five rows and their classes."""
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (5,), generator=generator)


def assert_equal(
    make: Make,
    between: Between | None = None,
    *,
    backend: str,
    steps: int = 6,
    tolerance: float = TOLERANCE,
    **settings: Any,
) -> Step:
    """Runs a loop in eager and compiled, and compares all that is left.

    Args:
        make: See `run`.
        between: See `run`.
        backend: See `run`.
        steps: See `run`.
        tolerance: Of the largest difference.
        settings: Further arguments of `run`.
    """
    settings = {"model": network, "optimizer": momentum, "batch": batches, **settings}
    _, expected = run(make, between, None, steps, **settings)
    world, found = run(make, between, backend, steps, **settings)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        _compare(name, found[name], value, tolerance)
    step = world.step
    assert isinstance(step, Step)
    assert step.refusals == {}
    assert step.launches > 0
    assert step.eager_steps < steps
    return step


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | list | tuple | dict | Tensor | None)


def _compare(name: str, found: Any, expected: Any, tolerance: float) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), name
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        error = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
        assert error <= tolerance, f"{name} is off by {error}"
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{name}: {found} instead of {expected}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            _compare(f"{name}[{i}]", a, b, tolerance)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{name}: {found} instead of {expected}"
        for key, value in expected.items():
            _compare(f"{name}[{key}]", found[key], value, tolerance)
    elif isinstance(expected, float):
        assert isinstance(found, float), f"{name}: {found!r} instead of {expected!r}"
        assert abs(found - expected) <= tolerance, (name, found, expected)
    else:
        assert type(found) is type(expected), f"{name}: {found!r} instead of {expected!r}"
        assert found == expected, name
