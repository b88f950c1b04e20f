"""Steps by replay: what training loops do with tensors, gradients and optimizers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.aot.record.checks import Case, Run, assert_equal, momentum, network


def plain(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def clears_first(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        return loss

    return step


def clears_to_zeros(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        return loss

    return step


def clips(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss, norm

    return step


def accumulates(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        loss = F.cross_entropy(run.model(x), y) / 3
        loss.backward()
        if run.state.n % 3 == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()
        return loss

    return step


def deletes_gradients(run: Run) -> Any:
    """`del p.grad` is `p.grad = None`."""
    run.state.gone = []
    weight = run.model[0].weight

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        del weight.grad
        run.state.gone.append(weight.grad is None)
        return loss

    return step


def schedules(run: Run) -> Any:
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1 / (1 + n))

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        scheduler.step()
        return loss, scheduler.get_last_lr()

    return step


def plateau(run: Run) -> Any:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=1)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = plain(run)(x, y)
        scheduler.step(loss.item())
        return loss

    return step


def averages(run: Run) -> Any:
    average = copy.deepcopy(run.model)
    run.state.average = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = plain(run)(x, y)
        with torch.no_grad():
            for a, p in zip(average.parameters(), run.model.parameters(), strict=True):
                a.lerp_(p, 0.1)
        return loss

    run.between = lambda i: run.state.average.append([p.clone() for p in average.parameters()])
    return step


def two_networks(run: Run) -> Any:
    judge = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    other = torch.optim.Adam(judge.parameters(), 0.01)
    run.optimizers.append(other)

    def step(x: Tensor, y: Tensor) -> Any:
        made = run.model(x)
        real = F.one_hot(y, 3).double()
        other.zero_grad()
        doubt = judge(made.detach()).mean() - judge(real).mean()
        doubt.backward()
        other.step()
        run.optimizer.zero_grad()
        loss = -judge(made).mean()
        loss.backward()
        run.optimizer.step()
        return loss, doubt

    return step


def gradient_penalty(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        middle = (0.5 * x).requires_grad_()
        out = run.model(middle)
        (slope,) = torch.autograd.grad(out.sum(), middle, create_graph=True)
        loss = F.cross_entropy(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def sharpness_aware(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        with torch.no_grad():
            parts = [p.grad.norm() for p in run.model.parameters()]
            scale = 0.05 / (torch.stack(parts).norm() + 1e-12)
            moves = []
            for p in run.model.parameters():
                move = p.grad * scale
                p.add_(move)
                moves.append(move)
        run.optimizer.zero_grad()
        F.cross_entropy(run.model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(run.model.parameters(), moves, strict=True):
                p.sub_(move)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def reads_the_loss(run: Run) -> Any:
    run.state.losses, run.state.best = [], None

    def step(x: Tensor, y: Tensor) -> Any:
        loss = plain(run)(x, y)
        run.state.losses.append(loss.item())
        if run.state.best is None or run.state.losses[-1] < run.state.best:
            run.state.best = run.state.losses[-1]
        return loss

    return step


def skips_by_value(run: Run) -> Any:
    run.state.skipped = 0

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        if not torch.isfinite(loss) or loss.item() > 1.2:
            run.state.skipped += 1
            return None
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def masks(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        mask = y > 0
        out = run.model(x)
        loss = F.cross_entropy(out, y, reduction="none")
        if mask.any():
            loss = loss * mask
        loss = loss.mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def selects_rows(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        rows = x[y > 0]
        if not len(rows):
            return None
        loss = run.model(rows).square().mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def prints(run: Run) -> Any:
    run.state.said = []

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        run.state.said.append(repr(loss))
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.state.said.append(f"{loss:.6f}")
        return loss

    return step


def keeps_gradients(run: Run) -> Any:
    run.state.gradients, run.state.same = [], []

    def step(x: Tensor, y: Tensor) -> Any:
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        gradient = run.model[0].weight.grad
        run.state.gradients.append(gradient)
        run.optimizer.step()
        return loss

    run.between = lambda i: run.state.same.append(
        run.state.gradients[-1] is run.model[0].weight.grad
    )
    return step


def keeps_views(run: Run) -> Any:
    run.state.views, run.state.kept = [], []
    held: list[Any] = [None]

    def step(x: Tensor, y: Tensor) -> Any:
        out = run.model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        detached = out.detach()
        held[0] = run.model[0].weight.detach()[1], detached, detached[0], x, x[1]
        return loss

    def between(i: int) -> None:
        with torch.no_grad():
            run.model[0].weight.mul_(0.5)
            for each in (held[0][2], held[0][4]):
                each.add_(1)
        run.state.views.append([t.clone() for t in held[0]])

    run.between = between
    return step


def scales_gradients(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        for p in run.model.parameters():
            p.grad = p.grad * 0.5
        run.model[0].bias.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def projects(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = plain(run)(x, y)
        for p in run.model.parameters():
            p.data = p.data.clamp(-0.3, 0.3)
        return loss

    return step


def evaluates(run: Run) -> Any:
    run.state.n, run.state.accuracy = 0, []

    def step(x: Tensor, y: Tensor) -> Any:
        loss = plain(run)(x, y)
        run.state.n += 1
        if run.state.n % 3 == 0:
            run.model.eval()
            with torch.no_grad():
                right = (run.model(x).argmax(1) == y).double().mean()
            run.state.accuracy.append(right.item())
            run.model.train()
        return loss

    return step


def freezes(run: Run) -> Any:
    run.between = lambda i: run.model[0].requires_grad_(i % 2 == 0) and None
    return plain(run)


def edits(run: Run) -> Any:
    def between(i: int) -> None:
        with torch.no_grad():
            run.model[0].weight.mul_(0.9)
        run.model[2].bias.data = run.model[2].bias.data * 0.5
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))

    run.between = between
    return plain(run)


def plants_gradients(run: Run) -> Any:
    def between(i: int) -> None:
        if i % 2:
            for p in run.model.parameters():
                p.grad = torch.full_like(p, 0.1)

    run.between = between
    return plain(run)


def scaler(run: Run) -> Any:
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    run.state.scale = []
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Any:
        run.state.n += 1
        loss = F.cross_entropy(run.model(x), y)
        if run.state.n == 3:
            loss = loss * float("inf")
        scaling.scale(loss).backward()
        scaling.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        scaling.step(run.optimizer)
        scaling.update()
        run.optimizer.zero_grad()
        return loss

    run.between = lambda i: run.state.scale.append(scaling.get_scale())
    return step


def autocasts(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Any:
        run.state.n += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=run.state.n % 2 == 0):
            loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def closure(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        def evaluate() -> Tensor:
            run.optimizer.zero_grad()
            loss = F.cross_entropy(run.model(x), y)
            loss.backward()
            return loss

        return run.optimizer.step(evaluate)

    return step


def draws(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        noise = torch.randn_like(x) * 0.1
        keep = torch.rand(()) < 0.5
        x = x + noise if keep.item() else x
        loss = F.cross_entropy(F.dropout(run.model(x), 0.2), y[torch.randperm(len(y))])
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def seeds(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Any:
        run.state.n += 1
        torch.manual_seed(run.state.n)
        return plain(run)(x + torch.randn_like(x), y)

    return step


def writes_to_the_batch(run: Run) -> Any:
    run.state.batches = []

    def step(x: Tensor, y: Tensor) -> Any:
        x.mul_(0.5)
        x[:, 0] = 1.0
        loss = plain(run)(x, y)
        run.state.batches.append(x)
        return loss

    return step


def normalized() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6, False), nn.BatchNorm1d(6), nn.ReLU(),
                         nn.Linear(6, 3)).double()  # fmt: skip


def attentive() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.1, batch_first=True, dtype=torch.float64)
    return nn.Sequential(
        nn.Linear(4, 12), nn.Unflatten(1, (2, 6)), layer, nn.Flatten(), nn.Linear(12, 3)
    ).double()


class Own(torch.optim.Optimizer):
    """An optimizer of the user's, which reads and writes Python numbers."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["n"] = torch.zeros_like(p), 0
                state["n"] += 1
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(state["mean"] / (1 - 0.9 ** state["n"]), alpha=-group["lr"])


SIZES = [5, 5, 4, 5, 4, 4]


def _sizes(i: int, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn(SIZES[i], 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (SIZES[i],), generator=generator)


CASES: dict[str, Case] = {
    **{f.__name__: Case(f) for f in (
        plain, clears_first, clears_to_zeros, clips, schedules, averages, two_networks,
        gradient_penalty, sharpness_aware, reads_the_loss, masks, prints, keeps_gradients,
        keeps_views,
        scales_gradients, projects, closure, writes_to_the_batch, plateau,
    )},
    **{f.__name__: Case(f, most_eager=6) for f in (
        accumulates, skips_by_value, selects_rows, evaluates, freezes, plants_gradients, scaler,
        autocasts, draws, seeds, edits, deletes_gradients,
    )},
    "sizes": Case(plain, batch=_sizes, most_eager=4),
    "batch norms": Case(plain, model=normalized),
    "attention": Case(plain, model=attentive, optimizer=lambda p: torch.optim.AdamW(p, 0.01)),
    "own optimizer": Case(plain, optimizer=Own, most_eager=4),
    "LBFGS": Case(closure, optimizer=lambda p: torch.optim.LBFGS(p, 0.1, 3), most_eager=6),
    "parts": Case(plain, batch=lambda i, g: tuple(torch.cat([t, t]) for t in _sizes(0, g)),
                  settings={"accumulate": 2}, optimizer=momentum, model=network),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_loop_equals_eager(name: str) -> None:
    assert_equal(CASES[name])


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01, nesterov=True, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_equals_eager(name: str) -> None:
    assert_equal(Case(schedules, optimizer=OPTIMIZERS[name], steps=5))


def _clips(run: Run) -> Any:
    run.state.without, run.state.flags = [], []
    changes = {1: [(0, False)], 3: [(0, True), (2, False)], 6: [(2, True)]}

    def between(i: int) -> None:
        for layer, flag in changes.get(i, []):
            run.model[layer].requires_grad_(flag)

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = run.model[0](x)
        run.state.flags.append(hidden.requires_grad)
        loss = F.cross_entropy(run.model[1:](hidden), y)
        loss.backward()
        run.state.without.append([n for n, p in run.model.named_parameters() if p.grad is None])
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    run.between = between
    return step


@pytest.mark.parametrize("backend", ["aot_eager", "openxla"])
def test_frozen_parameters_have_no_gradients_within_a_step(backend: str) -> None:
    step = assert_equal(Case(_clips, steps=10), backend)
    assert (step.eager_steps, step.launches, step.compilations) == (3, 7, 3)
