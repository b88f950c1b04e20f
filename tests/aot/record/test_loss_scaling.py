"""Steps with a GradScaler are one program, and skip an optimizer's step where eager does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends._torch_private import amp_scaling
from tests.aot.record.checks import Case, Run, assert_equal, batches

STEPS = 9
OVERFLOWS = (4, 7)


def batch(i: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Some batches have an infinity."""
    x, y = batches(i, generator)
    if i in OVERFLOWS:
        x[0, 0] = torch.inf
    return x, y


def scaler_of(run: Run, **settings: Any) -> Any:
    settings = {"init_scale": 1024.0, "growth_interval": 2, **settings}
    scaler = torch.amp.GradScaler("cpu", **settings)
    run.state.scales = []

    def note(i: int) -> None:
        run.state.scales.append(dict(scaler.state_dict()))
        if i == 5 and scaler.is_enabled():
            scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1})

    run.between = note
    return scaler


def scales(run: Run, unscales: bool = False, **settings: Any) -> Callable[..., None]:
    scaler = scaler_of(run, **settings)

    def step(x: Tensor, y: Tensor) -> None:
        scaler.scale(F.cross_entropy(run.model(x), y)).backward()
        if unscales:
            scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()

    return step


def clips(run: Run) -> Any:
    return scales(run, unscales=True)


def disabled(run: Run) -> Any:
    return scales(run, unscales=True, enabled=False)


def several(run: Run) -> Any:
    """Of two optimizers one overflows."""
    scaler = scaler_of(run)
    head = nn.Linear(4, 1).double()
    run.optimizers.append(torch.optim.AdamW(head.parameters(), 0.01))
    run.state.head = head.weight

    def step(x: Tensor, y: Tensor) -> None:
        losses = F.cross_entropy(run.model(x), y), head(x.nan_to_num(posinf=0)).square().mean()
        scaler.scale(losses[0] + losses[1]).backward()
        for optimizer in (run.optimizer, *run.optimizers):
            scaler.step(optimizer)
        scaler.update()
        for optimizer in (run.optimizer, *run.optimizers):
            optimizer.zero_grad()

    return step


def schedules(run: Run) -> Any:
    """The scheduler counts calls of the optimizer's step."""
    step = scales(run)
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    note = run.between

    def between(i: int) -> None:
        note(i)
        schedule.step()

    run.between = between
    return step


def accumulates(run: Run) -> Any:
    """Every second call updates."""
    scaler = scaler_of(run)
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> None:
        run.state.n += 1
        scaler.scale(F.cross_entropy(run.model(x), y) / 2).backward()
        if run.state.n % 2 == 0:
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()

    return step


def hooks(run: Run) -> Any:
    """They run where the step is taken."""
    run.state.taken = 0

    def count(*_: Any) -> None:
        run.state.taken += 1

    run.optimizer.register_step_post_hook(count)
    return scales(run)


def changes_the_growth(run: Run) -> Any:
    scaler = scaler_of(run)
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> None:
        run.state.n += 1
        scaler.set_growth_factor(2.0 + run.state.n % 3)
        scaler.scale(F.cross_entropy(run.model(x), y)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()

    return step


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, fused=True)


def finite(i: int, generator: torch.Generator) -> tuple[Any, ...]:
    return batches(i, generator)


CASES = {
    "scales": Case(scales),
    "clips": Case(clips),
    "Adam": Case(clips, optimizer=lambda p: torch.optim.Adam(p, 0.01, amsgrad=True)),
    "fused": Case(scales, optimizer=fused),
    "fused, clips": Case(clips, optimizer=fused),
    "disabled": Case(disabled, batch=finite),
    "several": Case(several),
    "schedules": Case(schedules),
    "accumulates": Case(accumulates, most_eager=5),
    "changes the growth": Case(changes_the_growth, most_eager=5),
}


LONG = ("scales", "Adam", "fused, clips", "disabled", "changes the growth")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in CASES]
)
def test_a_step_with_a_scaler_is_one_program(name: str) -> None:
    case = CASES[name]
    case.steps = STEPS
    case.batch = batch if case.batch is batches else case.batch
    step = assert_equal(case)
    assert step.cuts == 0
    assert step.launches == STEPS - step.eager_steps


def test_hooks_of_the_optimizer_run_where_it_steps() -> None:
    step = assert_equal(Case(hooks, batch=batch, steps=STEPS))
    assert step.cuts == 1  # Python asks whether it steps


def test_optimizers_unscale_by_themselves_outside_of_steps() -> None:
    made = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(fused(parameters))
        return made[-1]

    assert_equal(Case(scales, optimizer=make, steps=4))
    assert all(map(amp_scaling.unscales_in_step, made))
