"""Trains a model twice, in eager and by `compile_step`, and compares everything that is left."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends import Step, compile_step
from dynamo_backends.bench.suites import call
from harness import ModelCase
from tests.training import judging

TOLERANCE = judging.PRECISION

Make = Callable[[], nn.Module]
Optimize = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Trained:
    """What a training run leaves behind.

    Attributes:
        losses: One per step.
        model: The model.
        optimizer: The optimizer.
        step: The compiled step; None in eager.
    """

    losses: list[Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step | None = field(default=None)

    def everything(self) -> dict[str, Tensor]:
        """Losses, parameters, buffers and optimizer state by name."""
        found = {f"loss {i}": loss for i, loss in enumerate(self.losses)}
        found |= {f"value of {name}": value for name, value in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{k} of {number}": v for k, v in state.items() if torch.is_tensor(v)}
        return found


def squares(model: nn.Module, batch: Any) -> Tensor:
    """A loss for models of any outputs: the mean squares of all of them."""
    leaves = [x for x in pytree.tree_leaves(call(model, batch)) if isinstance(x, Tensor)]
    return sum((x.square().mean() for x in leaves if x.is_floating_point()), torch.zeros(()))


def train(
    make: Make,
    optimize: Optimize,
    batches: Sequence[Any],
    dtype: torch.dtype,
    backend: str | None,
    loss_of: Loss = squares,
    schedule: bool = False,
    clip: float | None = None,
    disturb: int | None = None,
    **settings: Any,
) -> Trained:
    """Trains a model.

    Args:
        make: Makes the model.
        optimize: Makes the optimizer of its parameters.
        batches: One per step.
        dtype: Of the model and of floating-point inputs.
        backend: For `compile_step`; None: in eager.
        loss_of: From the model and a batch to the loss.
        schedule: Whether a cosine schedule changes the learning rate.
        clip: The largest norm of the gradient, if it is clipped.
        disturb: A seed, for rounding weights before each step: see `judging.round_otherwise`.
        settings: Of `compile_step`.
    """
    torch.manual_seed(0)
    model = make().to(dtype).train()
    optimizer = optimize(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))

    def function(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step: Any = function
    if backend is not None:
        step = compile_step(function, model=model, optimizer=optimizer, backend=backend, **settings)
    torch.manual_seed(1)
    losses = []
    generator = torch.Generator().manual_seed(disturb or 0)
    for batch in batches:
        if disturb is not None:
            judging.round_otherwise(model, generator)
        losses.append(step(cast(batch, dtype)).detach())
        if schedule:
            scheduler.step()
    return Trained(losses, model, optimizer, step if backend is not None else None)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """A batch with its floating-point tensors in another dtype; everything is copied."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype).clone() if t.is_floating_point() else t.clone(), batch
    )


def batches_of(case: ModelCase, count: int) -> list[Any]:
    """Different inputs of the same shapes."""
    import dataclasses

    return [dataclasses.replace(case, seed=case.seed + i).inputs() for i in range(count)]


def assert_equal_to_eager(
    make: Make, optimize: Optimize, batches: Sequence[Any], backend: str, **settings: Any
) -> Step:
    """Trains in float64, compiled and in eager; see `judging.assert_agrees`."""
    plain = _eager_only(settings)
    expected = train(make, optimize, batches, torch.float64, None, **plain)
    ours = train(make, optimize, batches, torch.float64, backend, **settings)
    others = _rounded_otherwise(make, optimize, batches, torch.float64, plain)
    judging.assert_agrees(expected.everything(), ours.everything(), others)
    assert ours.step is not None
    return ours.step


def assert_as_accurate_as_eager(
    make: Make, optimize: Optimize, batches: Sequence[Any], backend: str, **settings: Any
) -> Step:
    """Trains in float32, compiled and in eager; see `judging.assert_as_accurate`."""
    plain = _eager_only(settings)
    precise = train(make, optimize, batches, torch.float64, None, **plain)
    eager = train(make, optimize, batches, torch.float32, None, **plain)
    ours = train(make, optimize, batches, torch.float32, backend, **settings)
    others = _rounded_otherwise(make, optimize, batches, torch.float32, plain)
    judging.assert_as_accurate(eager.everything(), ours.everything(), precise.everything(), others)
    assert ours.step is not None
    return ours.step


def _rounded_otherwise(
    make: Make,
    optimize: Optimize,
    batches: Sequence[Any],
    dtype: torch.dtype,
    settings: dict[str, Any],
) -> Iterator[judging.Run]:
    for seed in range(judging.OTHERS):
        yield train(make, optimize, batches, dtype, None, disturb=seed, **settings).everything()


def _eager_only(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k in ("loss_of", "schedule", "clip")}


def assert_close(name: str, expected: Tensor, found: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal up to a part of the largest element."""
    assert expected.dtype == found.dtype, name
    assert expected.shape == found.shape, name
    assert expected.stride() == found.stride(), name
    if not expected.is_floating_point() or not expected.numel():
        assert torch.equal(expected, found), name
        return
    largest = max(1e-3, expected.abs().max().item())
    worst = (expected - found).abs().max().item() / largest
    assert worst <= tolerance, f"{name} differs by {worst:.1e}, more than {tolerance:.1e}"


def compare(
    build: Callable[[torch.dtype], tuple[Any, list[nn.Module], list[torch.optim.Optimizer]]],
    batches: list[Any],
    backend: str = "openxla",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
    **settings: Any,
) -> Any:
    """Runs a step function in eager and compiled; returns the compiled step.

    Args:
        build: Makes the function, the modules and the optimizers.
        batches: Arguments of the calls; floating-point tensors are cast.
        backend: For `compile_step`.
        dtype: Of everything.
        tolerance: Relative, for results, parameters and buffers.
        settings: Of `compile_step`.
    """
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        function, models, optimizers = build(dtype)
        step = function
        if compiled:
            step = compile_step(
                function, model=models, optimizer=optimizers, backend=backend, **settings
            )
        torch.manual_seed(1)
        results = []
        for batch in batches:
            args = [
                x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in batch
            ]
            results.append(step(*args))
        outcomes.append((results, models, step))
    (expected, eager_models, _), (found, models, step) = outcomes
    for i, (e, f) in enumerate(zip(expected, found, strict=True)):
        assert_close(f"result {i}", e.detach(), f, tolerance)
    for eager_model, model in zip(eager_models, models, strict=True):
        for name, value in eager_model.state_dict().items():
            assert_close(name, value, model.state_dict()[name], tolerance)
        for name, p in eager_model.named_parameters():
            ours = model.get_parameter(name)
            assert (p.grad is None) == (ours.grad is None), name
            if p.grad is not None:
                assert ours.grad is not None
                assert_close(f"{name}.grad", p.grad, ours.grad, tolerance)
    return step


def assert_one_program(step: Any, calls: int, recorded: int = 1) -> None:
    """Checks that a step is one program at each call.

    Args:
        step: The step.
        calls: How many there were.
        recorded: How many of them, the first ones, ran in eager.
    """
    counts = step.launches, step.compilations, step.eager_steps
    assert counts == (calls - recorded, 1, recorded), (counts, step.divergences)
    assert (step.cuts, step.refusals) == (0, {})


def clone(trained: Trained) -> tuple[Any, Any]:
    """Copies of the state dicts of model and optimizer."""
    return copy.deepcopy((trained.model.state_dict(), trained.optimizer.state_dict()))
