"""Python state around and in a compiled step: each call reads and writes it as eager does."""

import dataclasses
import enum
import itertools
import logging
import random
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.aot.step_backends import BACKENDS, INDUCTOR
from tests.aot.step_checks import assert_one_program
from tests.aot.step_loops import World, assert_equal, batches

WEIGHT = 1.0
clock = time.time
SETTINGS = SimpleNamespace(weight=1.0)


class Schedule:
    scale = 1.0

    def __init__(self) -> None:
        self.base = 2.0

    @property
    def weight(self) -> float:
        return self.base * self.scale

    def get(self) -> "Schedule":
        return self


class Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


@dataclasses.dataclass
class Config:
    weight: float = 1.0
    inner: Any = None


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


# Where a number lives: how the step reads it, and how the loop changes it.


def _attribute(world: World) -> tuple[Any, Any]:
    return lambda: world.data.w, lambda w: setattr(world.data, "w", w)


def _closure(world: World) -> tuple[Any, Any]:
    weight = 1.0

    def put(w: float) -> None:
        nonlocal weight
        weight = w

    return lambda: weight, put


def _global(world: World) -> tuple[Any, Any]:
    return lambda: WEIGHT, lambda w: globals().update(WEIGHT=w)


def _global_object(world: World) -> tuple[Any, Any]:
    return lambda: SETTINGS.weight, lambda w: setattr(SETTINGS, "weight", w)


def _list(world: World) -> tuple[Any, Any]:
    weights = [1.0, 2.0]
    return lambda: weights[0] + weights[-1], lambda w: weights.__setitem__(0, w)


def _list_walked(world: World) -> tuple[Any, Any]:
    weights = [1.0, 2.0]
    return lambda: sum(w for w in weights), lambda w: weights.__setitem__(1, w)


def _dict(world: World) -> tuple[Any, Any]:
    weights = {"a": 1.0}
    return lambda: weights["a"], lambda w: weights.__setitem__("a", w)


def _dict_get(world: World) -> tuple[Any, Any]:
    weights: dict[str, float] = {}
    return lambda: weights.get("a", 1.0), lambda w: weights.__setitem__("a", w)


def _dict_values(world: World) -> tuple[Any, Any]:
    weights = {"a": 1.0, "b": 3.0}
    return lambda: sum(weights.values()), lambda w: weights.__setitem__("b", w)


def _dataclass(world: World) -> tuple[Any, Any]:
    config = Config(inner=Config())
    return lambda: config.inner.weight, lambda w: setattr(config.inner, "weight", w)


def _replaced_object(world: World) -> tuple[Any, Any]:
    world.data.c = Config()
    return lambda: world.data.c.weight, lambda w: setattr(world.data, "c", Config(w))


def _property(world: World) -> tuple[Any, Any]:
    schedule = Schedule()
    return lambda: schedule.get().weight, lambda w: setattr(schedule, "base", w)


def _class_attribute(world: World) -> tuple[Any, Any]:
    class Own(Schedule):
        pass

    schedule = Own()
    return lambda: schedule.weight, lambda w: setattr(Own, "scale", w)


def _slots(world: World) -> tuple[Any, Any]:
    slotted = Slotted()
    return lambda: slotted.weight, lambda w: setattr(slotted, "weight", w)


def _numpy_scalar(world: World) -> tuple[Any, Any]:
    world.data.w = np.float64(1.0)
    return lambda: float(world.data.w), lambda w: setattr(world.data, "w", np.float64(w))


def _array(world: World) -> tuple[Any, Any]:
    weights = np.ones(3)
    return lambda: float(weights[1]), lambda w: weights.__setitem__(1, w)


def _getattr(world: World) -> tuple[Any, Any]:
    return lambda: getattr(world.data, "w", 1.0), lambda w: setattr(world.data, "w", w)


def _vars(world: World) -> tuple[Any, Any]:
    return lambda: vars(world.data)["w"], lambda w: setattr(world.data, "w", w)


def _of_module(world: World) -> tuple[Any, Any]:
    world.model.alpha = 1.0  # type: ignore[assignment]
    return lambda: world.model.alpha, lambda w: setattr(world.model, "alpha", w)


def _integer(world: World) -> tuple[Any, Any]:
    world.data.w = 1
    return lambda: world.data.w % 3, lambda w: setattr(world.data, "w", round(10 * w))


def _text(world: World) -> tuple[Any, Any]:
    world.data.kind = "plain"
    names = ["plain", "double", "plain", "double", "double", "plain"]
    return (
        lambda: 2.0 if world.data.kind == "double" else 1.0,
        lambda w: setattr(world.data, "kind", names[round(10 * w) % 6]),
    )


def _enumeration(world: World) -> tuple[Any, Any]:
    world.data.mode = Mode.PLAIN
    return (
        lambda: float(world.data.mode.value),
        lambda w: setattr(world.data, "mode", Mode(1 + round(10 * w) % 2)),
    )


def _tensor_rebound(world: World) -> tuple[Any, Any]:
    world.data.t = torch.ones((), dtype=torch.float64)
    return lambda: world.data.t, lambda w: setattr(world.data, "t", world.data.t * w)


def _tensor_in_list(world: World) -> tuple[Any, Any]:
    tensors = [torch.ones((), dtype=torch.float64)]
    return lambda: tensors[0], lambda w: tensors.__setitem__(0, tensors[0] * w)


def _helper_function(world: World) -> tuple[Any, Any]:
    world.data.f = lambda: 1.0
    return lambda: world.data.f(), lambda w: setattr(world.data, "f", lambda: w)


READERS = [
    _attribute, _closure, _global, _global_object, _list, _list_walked, _dict, _dict_get,
    _dict_values, _dataclass, _replaced_object, _property, _class_attribute, _slots, _numpy_scalar,
    _array, _getattr, _vars, _of_module, _integer, _text, _enumeration, _tensor_rebound,
    _tensor_in_list, _helper_function,
]  # fmt: skip


_NEW_OBJECTS = (_replaced_object, _helper_function)
"""Known by identity: each compiles again."""


def _annealed(reader: Any, inside: bool) -> Any:
    def make(world: World) -> Any:
        world.data.w = 1.0
        read, put = reader(world)
        put(1.0)
        world.data.put = put
        step = 0

        def function(x: Tensor, y: Tensor) -> Tensor:
            nonlocal step
            loss = world.update(world.loss(x, y) * read())
            if inside:
                step += 1
                put(1.0 - 0.1 * (step % 4))
            return loss

        return function

    return make


def _anneal(world: World, i: int) -> None:
    world.data.put(0.9 - 0.1 * (i % 4) if i < 5 else 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reader", READERS, ids=lambda f: f.__name__.strip("_"))
def test_what_a_step_reads_may_change_between_steps(reader: Any, backend: str) -> None:
    step = assert_equal(_annealed(reader, inside=False), _anneal, backend=backend)
    assert step.compilations <= (6 if reader in _NEW_OBJECTS else 5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "reader", [_attribute, _closure, _list, _dict, _dataclass], ids=lambda f: f.__name__.strip("_")
)
def test_what_a_step_reads_may_be_changed_by_the_step(reader: Any, backend: str) -> None:
    step = assert_equal(_annealed(reader, inside=True), backend=backend, steps=8)
    assert step.compilations <= 6


@pytest.mark.parametrize("backend", ["openxla", INDUCTOR])
def test_numbers_become_inputs_of_every_backend(backend: str) -> None:
    def make(world: World) -> Any:
        world.data.weight, world.data.n = 1.0, 0

        def function(x: Tensor, y: Tensor) -> Tensor:
            loss = world.loss(x, y) * world.data.weight
            loss.backward()
            world.data.n += 1
            if world.data.n % 3 == 0:
                world.optimizer.step()
                world.optimizer.zero_grad()
            return loss

        return function

    def between(world: World, i: int) -> None:
        world.data.weight *= 0.5

    step = assert_equal(make, between, backend=backend, steps=9)
    assert step.compilations <= 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_counter_decides_when_to_update(backend: str) -> None:
    def make(world: World) -> Any:
        n = 0

        def function(x: Tensor, y: Tensor) -> Tensor:
            nonlocal n
            loss = world.loss(x, y)
            loss.backward()
            n += 1
            if n % 3 == 0:
                world.optimizer.step()
                world.optimizer.zero_grad()
            return loss

        return function

    step = assert_equal(make, backend=backend, steps=12)
    assert step.compilations <= 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_step_leaves_in_python_is_there_afterwards(backend: str) -> None:
    def make(world: World) -> Any:
        data = world.data
        data.previous, data.history, data.seen, data.last = None, [], 0, {}
        data.recent = deque(maxlen=3)
        data.total = torch.zeros((), dtype=torch.float64)

        def function(x: Tensor, y: Tensor) -> Tensor:
            hidden = world.model(x)
            loss = F.cross_entropy(hidden, y)
            if data.previous is not None:
                loss = loss + (hidden - data.previous).square().mean()
            world.update(loss)
            data.previous = hidden.detach()
            data.history.append(loss.detach())
            data.recent.append(loss.detach())
            data.seen += len(x)
            data.last["loss"], data.last["shape"] = loss.detach(), tuple(x.shape)
            data.total = data.total + loss.detach()
            return loss

        return function

    def between(world: World, i: int) -> None:
        world.data.recent_now = list(world.data.recent)
        if i == 3:
            world.data.history.clear()

    step = assert_equal(make, between, backend=backend, steps=6)
    assert step.compilations <= 3


def test_what_a_step_prints_is_printed_at_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    def make(world: World) -> Any:
        world.data.n = 0

        def function(x: Tensor, y: Tensor) -> Tensor:
            loss = world.update(world.loss(x, y))
            print("step", world.data.n, flush=True)
            world.data.n += 1
            return loss

        return function

    assert_equal(make, backend="aot_eager", steps=4)
    assert capsys.readouterr().out.split("\n")[4:8] == [f"step {i}" for i in range(4)]


def test_what_a_step_logs_is_logged_at_each_step(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(__name__)

    def make(world: World) -> Any:
        world.data.n = 0

        def function(x: Tensor, y: Tensor) -> Tensor:
            logger.warning("step %d", world.data.n)
            world.data.n += 1
            return world.update(world.loss(x, y))

        return function

    assert_equal(make, backend="aot_eager", steps=3)
    assert [r.getMessage() for r in caplog.records][3:] == [f"step {i}" for i in range(3)]


def _asks_a_scheduler(world: World) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 2)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = world.update(world.loss(x, y) * scheduler.get_last_lr()[0])
        scheduler.step()
        return loss

    return function


def _draws(world: World) -> Any:
    generator = random.Random(0)
    return lambda x, y: world.update(world.loss(x, y) * generator.random())


def _draws_of_numpy(world: World) -> Any:
    generator = np.random.default_rng(0)
    return lambda x, y: world.update(world.loss(x, y) * generator.random())


def _asks_for_the_time(world: World) -> Any:
    ticks = itertools.count(1)
    world.data.patch.setattr(sys.modules[__name__], "clock", lambda: next(ticks) / 2)
    return lambda x, y: world.update(world.loss(x, y) * (clock() % 2))


def _next_item(world: World) -> Any:
    items = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    return lambda x, y: world.update(world.loss(x, y) * next(items))


def _reads_a_file(world: World) -> Any:
    file = world.data.folder / "weights.txt"
    file.write_text("1.5\n0.5\n2.5\n0.25\n3.5\n4.0\n")
    world.data.n = 0

    def function(x: Tensor, y: Tensor) -> Tensor:
        with file.open() as lines:
            weight = float(list(lines)[world.data.n])
        world.data.n += 1
        return world.update(world.loss(x, y) * weight)

    return function


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [_draws, _draws_of_numpy, _asks_for_the_time, _next_item, _reads_a_file, _asks_a_scheduler],
)
def test_what_comes_from_outside_is_read_at_each_step(
    make: Any, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def with_folder(world: World) -> Any:
        world.data.patch, world.data.folder = monkeypatch, tmp_path
        return make(world)

    step = assert_equal(with_folder, backend=backend)
    # A number that changes becomes an input; the scheduler's has not changed at the second step.
    programs = 2 if make is _asks_a_scheduler else 1
    assert (step.compilations, step.eager_steps, step.launches) == (programs, 1, 5)


class _Batch:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


@dataclasses.dataclass
class _Record:
    x: Tensor
    y: Tensor
    weight: float = 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [_Batch, _Record])
def test_a_batch_may_be_an_object_new_or_used_again(kind: Any, backend: str) -> None:
    def make(world: World) -> Any:
        def function(batch: Any) -> Tensor:
            return world.update(world.loss(batch.x, batch.y) * getattr(batch, "weight", 1.0))

        return function

    shared: list[Any] = []

    def batch(i: int, generator: torch.Generator) -> tuple[Any]:
        x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
        made = kind(x, torch.randint(0, 3, (5,), generator=generator))
        if i % 2 and shared:
            shared[0].x, shared[0].y = made.x, made.y
            return (shared[0],)
        shared[:] = [made]
        return (made,)

    step = assert_equal(make, backend=backend, batch=batch)
    assert step.compilations == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_default_may_change(backend: str) -> None:
    def make(world: World) -> Any:
        def function(x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
            return world.update(world.loss(x, y) * weight)

        return function

    def between(world: World, i: int) -> None:
        world.function.__defaults__ = (1.0 + i % 2,)

    step = assert_equal(make, between, backend=backend)
    assert step.compilations <= 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_may_keep_state_of_its_own(backend: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(12, 8).double(), nn.Linear(8, 3).double()
            self.hidden: Tensor | None = None
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            before = self.hidden if self.hidden is not None else x.new_zeros(len(x), 8)
            hidden = torch.tanh(self.cell(torch.cat([x, before], 1)))
            self.hidden = hidden.detach()
            self.calls += 1
            return self.head(hidden)

    def make(world: World) -> Any:
        return lambda x, y: world.update(world.loss(x, y))

    def between(world: World, i: int) -> None:
        if i == 3:
            world.model.hidden = None

    step = assert_equal(make, between, backend=backend, model=Recurrent, steps=7)
    assert step.compilations <= 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_step_may_change_its_arguments(backend: str) -> None:
    given: list[dict[str, Any]] = []

    def make(world: World) -> Any:
        given.clear()
        world.data.keys = []

        def function(batch: dict[str, Any]) -> Tensor:
            classes = batch.pop("y")
            loss = world.update(world.loss(batch["x"], classes))
            batch["loss"] = loss.detach()
            return loss

        return function

    def batch(i: int, generator: torch.Generator) -> tuple[dict[str, Any]]:
        x, y = batches(i, generator)
        given.append({"x": x, "y": y})
        return (given[-1],)

    def between(world: World, i: int) -> None:
        world.data.keys.append(list(given[i]))
        setattr(world.data, f"loss_{i}", given[i]["loss"])

    step = assert_equal(make, between, backend=backend, batch=batch)
    assert_one_program(step, 6)
