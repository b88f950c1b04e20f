"""Steps by replay whose Python reads and writes state of every origin."""

import collections
import contextvars
import dataclasses
import functools
import heapq
import itertools
import os
import queue
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.aot.record.checks import Case, Run, assert_equal


def _update(run: Run, loss: Tensor) -> Tensor:
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


class DotDict(dict):  # type: ignore[type-arg]
    """A dict whose items are attributes, as those of OmegaConf and addict."""

    __getattr__ = dict.__getitem__


@dataclasses.dataclass
class Output:
    """What a step returns."""

    loss: Tensor
    size: int


def milestones(run: Run) -> Any:
    run.state.n, run.state.fired = 0, []

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        if run.state.n in {2, 4}:
            run.state.fired.append(run.state.n)
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.5
        return _update(run, F.cross_entropy(run.model(x), y))

    return step


def table_of_rates(run: Run) -> Any:
    run.state.n = 0
    rates = {1: 0.2, 3: 0.05}

    def step(x: Tensor, y: Tensor) -> Tensor:
        rate = rates.get(run.state.n)
        if rate is not None:
            run.optimizer.param_groups[0]["lr"] = rate
        run.state.n += 1
        return _update(run, F.cross_entropy(run.model(x), y))

    return step


def text_keys(run: Run) -> Any:
    run.state.history, run.state.said = {}, []
    n = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal n
        loss = _update(run, F.cross_entropy(run.model(x), y))
        run.state.history[f"loss/{n}"] = loss.detach()
        run.state.said.append(f"step {n}: lr {run.optimizer.param_groups[0]['lr']:.3f}")
        n += 1
        return loss

    return step


def generator_of_weights(run: Run) -> Any:
    cfg = SimpleNamespace(weights={"main": 1.0, "extra": 0.5})
    run.between = lambda i: cfg.weights.update(main=1.0 / (i + 2), extra=0.1 * i)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = run.model(x)
        losses = {"main": F.cross_entropy(out, y), "extra": out.square().mean()}
        return _update(run, sum(cfg.weights[k] * v for k, v in losses.items()))

    return step


def dot_dict(run: Run) -> Any:
    cfg = DotDict(scale=1.0, kind="plain")
    run.between = lambda i: cfg.update(scale=1.0 + 0.1 * i, kind="double" if i % 2 else "plain")

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cfg.scale * F.cross_entropy(run.model(x), y)
        return _update(run, 2 * loss if cfg.kind == "double" else loss)

    return step


def partial(run: Run) -> Any:
    cfg = {"smoothing": 0.0}

    def criterion(out: Tensor, y: Tensor, cfg: dict[str, float]) -> Tensor:
        return F.cross_entropy(out, y, label_smoothing=cfg["smoothing"])

    loss_of = functools.partial(criterion, cfg=cfg)
    run.between = lambda i: cfg.update(smoothing=0.05 * i)
    return lambda x, y: _update(run, loss_of(run.model(x), y))


def cached(run: Run) -> Any:
    run.state.calls = 0

    @functools.lru_cache
    def factor(n: int) -> float:
        run.state.calls += 1
        return 1.0 / n

    counter = itertools.count(1)
    return lambda x, y: _update(run, factor(next(counter) % 3 + 1) * run.model(x).square().mean())


@pytest.fixture(autouse=True)
def _variable_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_SCALE", "")


def environment(run: Run) -> Any:
    os.environ["STEP_SCALE"] = "1.0"
    run.between = lambda i: os.environ.update(STEP_SCALE=str(1.0 + i / 4))
    return lambda x, y: _update(
        run, float(os.environ["STEP_SCALE"]) * F.cross_entropy(run.model(x), y)
    )


def context_variable(run: Run) -> Any:
    scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
    run.between = lambda i: scale.set(1.0 + i) and None
    return lambda x, y: _update(run, scale.get() * F.cross_entropy(run.model(x), y))


def queues(run: Run) -> Any:
    line: queue.Queue[float] = queue.Queue()
    for i in range(20):
        line.put(1.0 + i / 10)
    run.state.done = queue.Queue()
    run.state.out = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = _update(run, line.get() * F.cross_entropy(run.model(x), y))
        run.state.done.put(loss.detach())
        run.state.out.append(run.state.done.get())
        return loss

    run.state.done = run.state.done
    return _without(run, "done", step)


def _without(run: Run, name: str, step: Any) -> Any:
    """A queue cannot be compared."""
    value = vars(run.state).pop(name)

    def call(*args: Any) -> Any:
        setattr(run.state, name, value)
        try:
            return step(*args)
        finally:
            delattr(run.state, name)

    return call


def weak_references(run: Run) -> Any:
    run.state.alive = []
    before: list[Any] = [None]

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.alive.append(before[0] is not None and before[0]() is not None)
        out = run.model(x)
        before[0] = weakref.ref(out)
        return _update(run, F.cross_entropy(out, y))

    return step


def generators(run: Run) -> Any:
    weights = itertools.cycle([1.0, 0.5, 0.25])
    return lambda x, y: _update(run, next(weights) * F.cross_entropy(run.model(x), y))


def python_random(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        scale = random.random() + numpy.random.rand()
        return _update(run, scale * F.cross_entropy(run.model(x), y))

    return step


def containers(run: Run) -> Any:
    run.state.lists = collections.defaultdict(list)
    run.state.history, run.state.heap, run.state.recent = [], [], collections.deque(maxlen=2)
    run.state.sums = numpy.zeros(2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = _update(run, F.cross_entropy(run.model(x), y))
        run.state.lists["loss"].append(loss.detach())
        run.state.history += [x.sum()]
        heapq.heappush(run.state.heap, len(run.state.history) % 3)
        run.state.recent.append(loss.detach() * 2)
        run.state.sums += 1
        return loss

    run.between = lambda i: setattr(run.state, "recent", list(run.state.recent))
    return step


def recent_losses(run: Run) -> Any:
    run.state.recent = []
    recent: collections.deque[Tensor] = collections.deque(maxlen=3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(run.model(x), y)
        if recent:
            loss = loss + 0.01 * torch.stack(list(recent)).mean()
        recent.append(loss.detach())
        return _update(run, loss)

    run.between = lambda i: run.state.recent.append(list(recent))
    return step


def returns_objects(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = _update(run, F.cross_entropy(run.model(x), y))
        out = Output(loss.detach(), len(x))
        return {"output": dataclasses.asdict(out), "space": SimpleNamespace(loss=out.loss + 1)}

    return step


def names(run: Run) -> Any:
    frozen: list[str] = []
    run.between = lambda i: frozen.append("0.") if i == 2 else None

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(run.model(x), y)
        for name, p in run.model.named_parameters():
            if not any(name.startswith(f) for f in frozen):
                loss = loss + 1e-2 * p.abs().sum()
        return _update(run, loss)

    return step


def formatted(run: Run) -> Any:
    run.state.said = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        rate = run.optimizer.param_groups[0]["lr"]
        run.state.said += [f"{rate:.3f}", round(rate, 3)]
        loss = _update(run, F.cross_entropy(run.model(x), y))
        run.state.said += [f"{loss:.4f}", round(loss.item(), 4), str(x.shape)]
        return loss

    return step


def attributes_on_tensors(run: Run) -> Any:
    weight: Any = run.model[0].weight
    weight.scale = 1.0
    run.between = lambda i: setattr(weight, "scale", 1.0 / (i + 1))
    run.state.seen = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = run.model(x)
        out.tag = len(run.state.seen)
        run.state.seen.append(out.tag)
        return _update(run, weight.scale * F.cross_entropy(out, y))

    return step


def keeps_tensors(run: Run) -> Any:
    run.state.mean = torch.zeros((), dtype=torch.float64)
    run.state.previous = None

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = run.model(x)
        loss = F.cross_entropy(out, y)
        if run.state.previous is not None:
            loss = loss + 0.1 * (out - run.state.previous).square().mean()
        run.state.previous = out.detach()
        run.state.mean = 0.9 * run.state.mean + 0.1 * loss.detach()
        return _update(run, loss)

    return step


def integers(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        return _update(run, F.cross_entropy(run.model(x) * run.state.n, y) / run.state.n)

    return step


def numpy_numbers(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        angle = numpy.float64(run.state.n) / 5
        low = numpy.int64(run.state.n % 2)
        mixed = x.clone()
        mixed[low : low + 2] = x.flip(0)[low : low + 2]  # as of a box that NumPy has drawn
        loss = F.cross_entropy(run.model(mixed) * numpy.cos(angle), y) * numpy.int32(run.state.n)
        return _update(run, loss / numpy.float32(1 + run.state.n) + torch.tensor(angle) * 0)

    return step


def early_return(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Any:
        run.state.n += 1
        loss = F.cross_entropy(run.model(x), y)
        if run.state.n % 3 == 0:
            return None
        return _update(run, loss)

    return step


def swaps_modules(run: Run) -> Any:
    run.between = lambda i: run.model.__setitem__(1, nn.ReLU()) if i == 2 else None
    return lambda x, y: _update(run, F.cross_entropy(run.model(x), y))


LOOPS: list[Callable[[Run], Any]] = [
    milestones, table_of_rates, text_keys, generator_of_weights, dot_dict, partial, cached,
    environment, context_variable, queues, weak_references, generators, python_random, containers,
    recent_losses, returns_objects, names, formatted, attributes_on_tensors, keeps_tensors,
    integers, numpy_numbers, early_return, swaps_modules,
]  # fmt: skip

SEVERAL_WAYS = {early_return: 6, milestones: 6, table_of_rates: 6, recent_losses: 6, cached: 6,
                formatted: 6, swaps_modules: 6, keeps_tensors: 4, names: 6, dot_dict: 6,
                attributes_on_tensors: 6, numpy_numbers: 6}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_python_state_is_that_of_eager(loop: Callable[[Run], Any]) -> None:
    assert_equal(Case(loop, most_eager=SEVERAL_WAYS.get(loop, 3)))


def test_launches_are_counted_when_a_number_becomes_an_input() -> None:
    def loop(run: Run) -> Any:
        run.state.n = 0

        def step(x: Tensor, y: Tensor) -> Tensor:
            run.state.n += 1
            loss = F.cross_entropy(run.model(x), y) * (0.5 if run.state.n < 4 else 1 / run.state.n)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        return step

    step = assert_equal(Case(loop, steps=7))
    assert (step.launches, step.compilations, step.eager_steps) == (6, 2, 1)
