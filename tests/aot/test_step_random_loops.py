"""Random training loops: a compiled step equals the eager one.

Each run has a few of `LOOPS`, others in turn. A note of the error names the seed.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.aot.step_loops import World, assert_equal
from tests.rotation import seeds

LOOPS = 500
QUICK = 8
STEPS = 8

Edit = Callable[[World, int], None]
Body = Callable[[World], Callable[[Tensor, Tensor, Tensor], Tensor]]


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


# Biases of keys, and before a normalization, have no gradient but rounding, which Adam makes a step
# of; here there are none.


def _normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def _attentive() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, bias=False)
    return nn.Sequential(
        nn.Linear(4, 12), nn.Unflatten(1, (2, 6)), layer, nn.Flatten(), nn.Linear(12, 3)
    )


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.LayerNorm(6), nn.Linear(6, 3))


MODELS = [_perceptron, _normalized, _attentive, _dropping]

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, 0.01),
    lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    lambda p: torch.optim.Adagrad(p, 0.05),
    lambda p: torch.optim.NAdam(p, 0.01),
]


# What multiplies or adds to the loss: from the world to a function of the loss and the output.


def _weight_of_attribute(world: World) -> Body:
    world.data.weight = 1.0
    return lambda loss, out, x: loss * world.data.weight


def _weight_of_list(world: World) -> Body:
    world.data.weights = [1.0, 0.5]
    return lambda loss, out, x: loss * world.data.weights[0] + 0.1 * world.data.weights[1]


def _weight_of_dict(world: World) -> Body:
    world.data.table = {"main": 1.0}
    return lambda loss, out, x: loss * world.data.table["main"]


def _weight_that_decays(world: World) -> Body:
    weight = 1.0

    def body(loss: Tensor, out: Tensor, x: Tensor) -> Tensor:
        nonlocal weight
        weight *= 0.9
        return loss * weight

    return body


def _warm_up(world: World) -> Body:
    world.data.calls = 0

    def body(loss: Tensor, out: Tensor, x: Tensor) -> Tensor:
        world.data.calls += 1
        return loss * min(1.0, world.data.calls / 4)

    return body


def _consistency(world: World) -> Body:
    world.data.previous = None

    def body(loss: Tensor, out: Tensor, x: Tensor) -> Tensor:
        if world.data.previous is not None:
            loss = loss + 0.1 * (out - world.data.previous).square().mean()
        world.data.previous = out.detach()
        return loss

    return body


def _running_mean(world: World) -> Body:
    world.data.mean = torch.zeros((), dtype=torch.float64)

    def body(loss: Tensor, out: Tensor, x: Tensor) -> Tensor:
        world.data.mean = 0.9 * world.data.mean + 0.1 * loss.detach()
        return loss + 0 * world.data.mean

    return body


def _history(world: World) -> Body:
    world.data.history = []

    def body(loss: Tensor, out: Tensor, x: Tensor) -> Tensor:
        world.data.history.append(loss.detach())
        return loss

    return body


def _penalty(world: World) -> Body:
    return lambda loss, out, x: loss + 1e-3 * sum(p.abs().sum() for p in world.model.parameters())


def _mode(world: World) -> Body:
    world.data.kind = "plain"

    def body(loss: Tensor, out: Tensor, x: Tensor) -> Tensor:
        return loss * 2 if world.data.kind == "double" else loss

    return body


TERMS = [
    _weight_of_attribute, _weight_of_list, _weight_of_dict, _weight_that_decays, _warm_up,
    _consistency, _running_mean, _history, _penalty, _mode,
]  # fmt: skip


# How a step updates.


def _update(world: World, loss: Tensor) -> None:
    world.update(loss)


def _clear_first(world: World, loss: Tensor) -> None:
    world.optimizer.zero_grad()
    loss.backward()
    world.optimizer.step()


def _clear_to_zeros(world: World, loss: Tensor) -> None:
    loss.backward()
    world.optimizer.step()
    world.optimizer.zero_grad(set_to_none=False)


def _clip(world: World, loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(world.model.parameters(), 0.5)
    world.optimizer.step()
    world.optimizer.zero_grad()


def _every_third(world: World, loss: Tensor) -> None:
    world.data.micro = getattr(world.data, "micro", 0) + 1
    loss.backward()
    if world.data.micro % 3 == 0:
        world.optimizer.step()
        world.optimizer.zero_grad()


def _project(world: World, loss: Tensor) -> None:
    world.update(loss)
    for p in world.model.parameters():
        p.data = p.data.clamp(-1, 1)


UPDATES = [_update, _clear_first, _clear_to_zeros, _clip, _every_third, _project]


SCHEDULERS: list[Any] = [
    None,
    lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
]


# What happens between two steps.


def _nothing(world: World, i: int) -> None:
    pass


def _edit_weights(world: World, i: int) -> None:
    with torch.no_grad():
        next(world.model.parameters()).mul_(0.9)


def _edit_data(world: World, i: int) -> None:
    p = next(world.model.parameters())
    p.data = p.data * 0.9


def _plant_gradients(world: World, i: int) -> None:
    for p in list(world.model.parameters())[-2:]:
        p.grad = torch.full_like(p, 0.1)


def _change_rate(world: World, i: int) -> None:
    for group in world.optimizer.param_groups:
        group["lr"] *= 0.7


def _change_decay(world: World, i: int) -> None:
    for group in world.optimizer.param_groups:
        group["weight_decay"] = 0.02 * (i % 2)


def _toggle_freezing(world: World, i: int) -> None:
    p = next(world.model.parameters())
    p.requires_grad_(not p.requires_grad)


def _toggle_eval(world: World, i: int) -> None:
    world.model.train(not world.model.training)


def _replace_layer(world: World, i: int) -> None:
    if isinstance(world.model[1], nn.Tanh):  # type: ignore[index]
        world.model[1] = nn.ReLU()  # type: ignore[index]


def _reload(world: World, i: int) -> None:
    world.model.load_state_dict(copy.deepcopy(world.model.state_dict()))
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))


def _change_python(world: World, i: int) -> None:
    data = world.data
    if hasattr(data, "weight"):
        data.weight *= 0.8
    if hasattr(data, "weights"):
        data.weights[i % 2] += 0.1
    if hasattr(data, "table"):
        data.table["main"] = data.table["main"] * 0.9
    if hasattr(data, "kind"):
        data.kind = "double" if data.kind == "plain" else "plain"
    if hasattr(data, "previous") and i % 3 == 2:
        data.previous = None
    if hasattr(data, "mean"):
        data.mean = data.mean * 2


EDITS: list[Edit] = [
    _edit_weights, _edit_data, _plant_gradients, _change_rate, _change_decay, _toggle_freezing,
    _toggle_eval, _replace_layer, _reload, _change_python,
]  # fmt: skip


def loop_of(seed: int) -> dict[str, Any]:
    """A random loop: the arguments of `assert_equal`."""
    rng = random.Random(seed)
    model, optimizer = rng.choice(MODELS), rng.choice(OPTIMIZERS)
    terms = rng.sample(TERMS, rng.randint(0, 3))
    update, scheduler = rng.choice(UPDATES), rng.choice(SCHEDULERS)
    inside = rng.random() < 0.6
    edits = {i: rng.choice(EDITS) for i in range(STEPS) if rng.random() < 0.4}
    rows = [rng.choice([5, 5, 5, 4]) for _ in range(STEPS)]

    def make(world: World) -> Any:
        bodies = [term(world) for term in terms]
        schedule = scheduler(world.optimizer) if scheduler is not None else None
        world.data.outside = None if inside or schedule is None else schedule.step

        def function(x: Tensor, y: Tensor) -> Tensor:
            out = world.model(x)
            loss = F.cross_entropy(out, y)
            for body in bodies:
                loss = body(loss, out, x)
            update(world, loss)
            if schedule is not None and inside:
                schedule.step()
            return loss

        return function

    def between(world: World, i: int) -> None:
        edits.get(i, _nothing)(world, i)
        if world.data.outside is not None:
            world.data.outside()

    def batch(i: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        count = rows[i] if _consistency not in terms else 5
        x = torch.randn(count, 4, dtype=torch.float64, generator=generator)
        return x, torch.randint(0, 3, (count,), generator=generator)

    return {
        "make": make, "between": between, "batch": batch, "steps": STEPS, "optimizer": optimizer,
        "model": lambda: model().double(),
    }  # fmt: skip


def check(seed: int, backend: str = "aot_eager") -> int:
    """Runs a loop; returns how many of its steps were compiled."""
    loop = loop_of(seed)
    try:
        step = assert_equal(loop.pop("make"), loop.pop("between"), backend=backend, **loop)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    return STEPS - step.eager_steps


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_random_loops_equal_eager(request: pytest.FixtureRequest) -> None:
    chosen = (
        range(LOOPS)
        if request.config.getoption("--full")
        else [seed % LOOPS for seed in seeds(QUICK)]
    )
    print(f"seeds {chosen}")
    compiled = [check(seed) for seed in chosen]
    assert sum(compiled) >= STEPS * len(compiled) // 3, compiled
