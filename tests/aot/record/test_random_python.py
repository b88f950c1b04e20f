"""Random steps by replay whose Python reads and writes numbers of every origin.

A loop is drawn of where a number is, what the step does with it, and who changes it when; and of a
model, an optimizer and an update. `DYNAMO_BACKENDS_LOOPS=3000` runs so many. A note of the error
names the seed.
"""

import contextvars
import dataclasses
import functools
import os
import queue
import random
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.aot.record.checks import Case, Run, assert_equal, momentum, network
from tests.aot.record.test_python_state import DotDict
from tests.aot.record.test_training import attentive, normalized
from tests.rotation import seeds

QUICK = 6
STEPS = 7

Get, Set = Callable[[], int], Callable[[int], None]
GLOBAL = 0


# Where the number is: what reads it, and what writes it.


def _closure(run: Run) -> tuple[Get, Set]:
    value = 0

    def write(new: int) -> None:
        nonlocal value
        value = new

    return lambda: value, write


def _global(run: Run) -> tuple[Get, Set]:
    def write(new: int) -> None:
        global GLOBAL
        GLOBAL = new

    write(0)
    return lambda: GLOBAL, write


def _attribute(run: Run) -> tuple[Get, Set]:
    owner = SimpleNamespace(value=0)
    return lambda: owner.value, lambda new: setattr(owner, "value", new)


def _attribute_of_the_model(run: Run) -> tuple[Get, Set]:
    run.model.stage = 0
    return lambda: run.model.stage, lambda new: setattr(run.model, "stage", new)


def _class(run: Run) -> tuple[Get, Set]:
    owner = type("Owner", (), {"value": 0})
    return lambda: owner().value, lambda new: setattr(owner, "value", new)  # type: ignore[attr-defined]


def _module(run: Run) -> tuple[Get, Set]:
    owner = types.ModuleType("settings")
    owner.value = 0  # type: ignore[attr-defined]
    return lambda: owner.value, lambda new: setattr(owner, "value", new)


def _item(run: Run) -> tuple[Get, Set]:
    table = {"a": {"b": 0}}
    return lambda: table["a"]["b"], lambda new: table["a"].update(b=new)


def _element(run: Run) -> tuple[Get, Set]:
    line = [1, 0]
    return lambda: line[-1], lambda new: line.__setitem__(-1, new)


def _dot_dict(run: Run) -> tuple[Get, Set]:
    cfg = DotDict(value=0)
    return lambda: cfg.value, lambda new: cfg.update(value=new)


@dataclasses.dataclass(frozen=True)
class _Settings:
    value: int


def _frozen_object(run: Run) -> tuple[Get, Set]:
    holder = [_Settings(0)]
    return lambda: holder[0].value, lambda new: holder.__setitem__(0, _Settings(new))


@pytest.fixture(autouse=True)
def _variable_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_VALUE", "")


def _environment(run: Run) -> tuple[Get, Set]:
    os.environ["STEP_VALUE"] = "0"
    return (
        lambda: int(os.environ["STEP_VALUE"]),
        lambda new: os.environ.update(STEP_VALUE=str(new)),
    )


def _context_variable(run: Run) -> tuple[Get, Set]:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("value", default=0)
    variable.set(0)
    return variable.get, lambda new: variable.set(new) and None


def _queue(run: Run) -> tuple[Get, Set]:
    line: queue.Queue[int] = queue.Queue()
    line.put(0)

    def read() -> int:
        value = line.get()
        line.put(value)
        return value

    def write(new: int) -> None:
        line.get()
        line.put(new)

    return read, write


def _partial(run: Run) -> tuple[Get, Set]:
    cfg = {"value": 0}
    return functools.partial(lambda cfg: cfg["value"], cfg), lambda new: cfg.update(value=new)


def _cache(run: Run) -> tuple[Get, Set]:
    number = [0]

    @functools.lru_cache
    def read() -> int:
        return number[0]

    def write(new: int) -> None:
        number[0] = new
        read.cache_clear()

    return read, write


def _generator(run: Run) -> tuple[Get, Set]:
    number = [0]

    def forever() -> Any:
        while True:
            yield number[0]

    values = forever()
    return lambda: next(values), lambda new: number.__setitem__(0, new)


def _array(run: Run) -> tuple[Get, Set]:
    array = numpy.zeros(3, int)
    return lambda: int(array[1]), lambda new: array.__setitem__(1, new)


def _tensor_attribute(run: Run) -> tuple[Get, Set]:
    weight: Any = next(run.model.parameters())
    weight.stage = 0
    return lambda: weight.stage, lambda new: setattr(weight, "stage", new)


def _group(run: Run) -> tuple[Get, Set]:
    group = run.optimizer.param_groups[0]
    group["stage"] = 0
    return lambda: group["stage"], lambda new: group.update(stage=new)


def _closed_over_default(run: Run) -> tuple[Get, Set]:
    def read(values: list[int] = [0]) -> int:  # noqa: B006 - that is the point
        return values[0]

    defaults: Any = read.__defaults__
    return read, lambda new: defaults[0].__setitem__(0, new)


SOURCES = [
    _closure, _global, _attribute, _attribute_of_the_model, _class, _module, _item, _element,
    _dot_dict, _frozen_object, _environment, _context_variable, _queue, _partial, _cache,
    _generator, _array, _tensor_attribute, _group, _closed_over_default,
]  # fmt: skip


# What the step does with it.

Use = Callable[[Run, int, Tensor, Tensor], Tensor]


def _weighs(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    return loss * (1 + value / 4)


def _weighs_by_integer(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    return loss * (value + 1)


def _chooses(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    return loss.sqrt() if value in {1, 3} else loss


def _names(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    run.state.history[f"loss/{value}"] = loss.detach()
    return loss


def _counts(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    run.state.history.setdefault("n", []).append(value)
    return loss + sum(run.state.history["n"]) * 1e-3


def _repeats(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    for _ in range(value):
        loss = loss + 0.01 * run.model(x).square().mean()
    return loss


def _slices(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    return loss + x[value % 4].sum() * 1e-2


def _drops(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    return loss + F.dropout(run.model(x), 0.1 + 0.1 * (value % 4)).mean()


def _clamps(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    return loss.clamp(max=0.5 + value)


def _keeps(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    before = run.state.history.get("kept")
    if value % 2 == 0:
        run.state.history["kept"] = loss.detach()
    return loss if before is None else loss + 0.1 * before


def _sets_the_rate(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    run.optimizer.param_groups[0]["lr"] = 0.05 / (1 + value)
    return loss


def _reads_a_value(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    return loss * 2 if loss.item() > 1 + 0.1 * value else loss


def _logs(run: Run, value: int, loss: Tensor, x: Tensor) -> Tensor:
    run.state.history.setdefault("said", []).append(f"step {value}: {tuple(x.shape)}")
    return loss


USES: list[Use] = [
    _weighs, _weighs_by_integer, _chooses, _names, _counts, _repeats, _slices, _drops, _clamps,
    _keeps, _sets_the_rate, _reads_a_value, _logs,
]  # fmt: skip


# How it updates.


def _plain(run: Run, loss: Tensor) -> None:
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def _clears_first(run: Run, loss: Tensor) -> None:
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()


def _clips(run: Run, loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.optimizer.step()
    run.optimizer.zero_grad()


def _every_second(run: Run, loss: Tensor) -> None:
    run.state.micro = getattr(run.state, "micro", 0) + 1
    loss.backward()
    if run.state.micro % 2 == 0:
        run.optimizer.step()
        run.optimizer.zero_grad()


def _logs_after(run: Run, loss: Tensor) -> None:
    _plain(run, loss)
    run.state.history["last"] = loss.item()


UPDATES = [_plain, _clears_first, _clips, _every_second, _logs_after]

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    momentum,
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.AdamW(p, 0.01),
    lambda p: torch.optim.RMSprop(p, 0.01),
]


def case_of(seed: int) -> Case:
    """A random loop."""
    rng = random.Random(seed)
    parts = [(rng.choice(SOURCES), rng.choice(USES)) for _ in range(rng.randint(1, 3))]
    by_step = [rng.random() < 0.4 for _ in parts]
    changes = [[rng.randint(0, 4) if rng.random() < 0.6 else None for _ in parts]
               for _ in range(STEPS)]  # fmt: skip
    update = rng.choice(UPDATES)
    rows = [rng.choice([5, 5, 5, 4]) for _ in range(STEPS)]

    def loop(run: Run) -> Any:
        run.state.history = {}
        places = [source(run) for source, _ in parts]

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(run.model(x), y)
            for (read, write), (_, use), counts in zip(places, parts, by_step, strict=True):
                if counts:
                    write(read() + 1)
                loss = use(run, read(), loss, x)
            update(run, loss)
            return loss

        def between(i: int) -> None:
            for (_, write), new, counts in zip(places, changes[i], by_step, strict=True):
                if new is not None and not counts:
                    write(new)

        run.between = between
        return step

    def batch(i: int, generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(rows[i], 4, dtype=torch.float64, generator=generator)
        return x, torch.randint(0, 3, (rows[i],), generator=generator)

    return Case(
        loop, rng.choice([network, network, normalized, attentive]), rng.choice(OPTIMIZERS), batch,
        STEPS, most_eager=STEPS,
    )  # fmt: skip


def check(seed: int, backend: str = "aot_eager") -> int:
    """Runs a loop; returns how many of its steps were compiled."""
    try:
        step = assert_equal(case_of(seed), backend)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    return STEPS - int(step.eager_steps)


def test_random_loops_equal_eager(request: pytest.FixtureRequest) -> None:
    count = int(os.environ.get("DYNAMO_BACKENDS_LOOPS", QUICK))
    full = request.config.getoption("--full") or count != QUICK
    chosen = range(max(count, 100)) if full else seeds(count)
    print(f"seeds {chosen}")
    compiled = [check(seed) for seed in chosen]
    assert sum(compiled) >= STEPS * len(compiled) // 5, compiled
