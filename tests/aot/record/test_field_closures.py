"""Steps with nested functions, and with counters as keys, members and text.

These loops did not equal eager when a step was captured once. Each runs in eager and compiled, and
all that it leaves is compared: results, gradients, the model, the optimizer, Python's state and
random state. Most of its calls run programs.
"""

import enum
import functools
import io
import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.aot.record.checks import (
    STEPS,
    Loop,
    Run,
    trains,
    update,
)

# Free variables of nested functions: they have the values of this call, and writes to them stay.


def _configuration(run: Run) -> SimpleNamespace:
    cfg = SimpleNamespace(weights={"main": 1.0, "extra": 0.5}, scale=1.0)

    def change(i: int) -> None:
        cfg.weights.update(main=1.0 / (i + 2), extra=0.1 * i + 0.05)
        cfg.scale = 1.5 + i / 8

    run.between = change
    return cfg


def _losses(run: Run, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    out = run.model(x)
    return {"main": F.cross_entropy(out, y), "extra": out.square().mean()}


def in_generator_expression(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return sum(cfg.weights[k] * v for k, v in losses.items())


def in_list_comprehension(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return torch.stack([cfg.weights[k] * v for k, v in losses.items()]).sum()


def in_dict_comprehension(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return sum({k: cfg.weights[k] * v for k, v in losses.items()}.values())


def in_map(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return sum(map(lambda k: cfg.weights[k] * losses[k], losses))  # noqa: C417


def in_reduction(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return functools.reduce(lambda a, k: a + cfg.weights[k] * losses[k], losses, 0.0)


def in_starmap(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return sum(itertools.starmap(lambda k, v: cfg.weights[k] * v, losses.items()))


def in_checkpoint(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return checkpoint(lambda v: v * v * cfg.scale, losses["main"], use_reentrant=False)


def in_checkpoint_that_saves_nothing(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return checkpoint(lambda v: v * cfg.scale, losses["main"], use_reentrant=False)


def in_reentrant_checkpoint(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return checkpoint(
        lambda v: v.exp() * cfg.scale / cfg.weights["main"], losses["main"], use_reentrant=True
    )


def in_checkpointed_layer(cfg: Any, losses: dict[str, Tensor]) -> Any:
    def layer(v: Tensor) -> Tensor:
        return (v.exp() * cfg.scale).tanh() ** cfg.scale - cfg.weights["main"] / v.clamp(
            min=cfg.scale / 9
        )

    return checkpoint(layer, torch.stack([*losses.values()]), use_reentrant=False).sum()


def in_nested_function(cfg: Any, losses: dict[str, Tensor]) -> Any:
    def weighed(k: str) -> Tensor:
        def times(v: Tensor) -> Tensor:
            return cfg.weights[k] * v

        return times(losses[k])

    return weighed("main") + weighed("extra")


READS = (in_generator_expression, in_list_comprehension, in_dict_comprehension, in_map,
         in_reduction, in_starmap, in_checkpoint, in_checkpoint_that_saves_nothing,
         in_reentrant_checkpoint, in_checkpointed_layer, in_nested_function)  # fmt: skip


@pytest.mark.parametrize("read", READS, ids=lambda f: f.__name__)
def test_nested_functions_read_what_is_there_now(read: Any) -> None:
    def loop(run: Run) -> Any:
        cfg = _configuration(run)
        return lambda x, y: update(run, read(cfg, _losses(run, x, y)))

    trains(loop)


CHOICES = {
    "max": lambda cfg, losses: losses[max(losses, key=lambda k: cfg.weights[k])],
    "min": lambda cfg, losses: losses[min(losses, key=lambda k: cfg.weights[k])],
    "sorted": lambda cfg, losses: losses[sorted(losses, key=lambda k: -cfg.weights[k])[0]],
    "any": lambda cfg, losses: losses[
        "main" if any(w > 0.4 for w in cfg.weights.values()) else "extra"
    ],
    "next": lambda cfg, losses: next(v for k, v in losses.items() if cfg.weights[k] > 0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_nested_functions_choose_by_what_is_there_now(name: str) -> None:
    def loop(run: Run) -> Any:
        cfg = _configuration(run)
        return lambda x, y: update(run, CHOICES[name](cfg, _losses(run, x, y)))

    trains(loop, ways=2)


def _counts_by_closure(run: Run) -> Any:
    calls, run.state.seen = 0, []

    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            run.optimizer.zero_grad()
            loss = F.cross_entropy(run.model(x), y) / (1 + calls % 3)
            loss.backward()
            return loss

        loss = run.optimizer.step(closure)
        run.state.seen.append(calls)
        return loss

    return step


def _counts_in_nested_functions(run: Run) -> Any:
    run.state.seen, calls = [], 0

    def count(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return v * calls

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = _losses(run, x, y)
        loss = sum(map(count, losses.values())) / 10
        loss = loss + torch.stack([count(v) for v in losses.values()]).mean() / 10
        run.state.seen.append(calls)
        return update(run, loss)

    return step


def _counts_in_checkpoints(run: Run) -> Any:
    run.state.seen, calls = [], 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        def part(v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1  # in the backward pass, too
            return run.model(v)

        loss = F.cross_entropy(checkpoint(part, x, use_reentrant=False), y)
        update(run, loss)
        run.state.seen.append(calls)
        return loss

    return step


def _counts_in_class_of_step(run: Run) -> Any:
    run.state.seen = []

    class Trainer:
        calls = 0

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            type(self).calls += 1
            self.last = getattr(self, "last", 0) + self.calls
            run.state.seen.append((self.calls, self.last))
            return update(run, F.cross_entropy(run.model(x), y) / self.calls)

    return Trainer().step


@pytest.mark.parametrize(
    "loop",
    [_counts_by_closure, _counts_in_nested_functions, _counts_in_checkpoints,
     _counts_in_class_of_step],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_nested_functions_write_at_each_call(loop: Loop) -> None:
    trains(loop, ways=1)


# Counters as keys, members and text.


class Phase(enum.Enum):
    """Of a training."""

    WARM = 0.5
    FULL = 1.0


CONFIGURED = {2, 4}
TABLE = {1: 0.2, 3: 0.05}


def _member(run: Run, n: int) -> None:
    if n in CONFIGURED:
        run.state.log.append(n)
        run.optimizer.param_groups[0]["lr"] *= 0.5


def _key(run: Run, n: int) -> None:
    run.optimizer.param_groups[0]["lr"] = TABLE.get(n, 0.1)


def _table(run: Run, n: int) -> None:
    run.optimizer.param_groups[0]["lr"] = [0.1, 0.2, 0.05][n % 3]


def _case(run: Run, n: int) -> None:
    match n:
        case 3 | 5:
            run.state.log.append("match")
        case _ if n > 6:
            run.state.log.append("late")


def _range(run: Run, n: int) -> None:
    if n in range(2, 20, 3) or not n % 4:
        run.state.log.append(n)


def _phase(run: Run, n: int) -> None:
    run.state.log.append((Phase.WARM if n < 3 else Phase.FULL).name)


def _text(run: Run, n: int) -> None:
    lr = run.optimizer.param_groups[0]["lr"] = 0.1 / n
    run.state.log.append(f"step {n}: {lr:.3f} {lr} {lr!r} {round(lr, 3)} {n:04d} {n!s} {n!r}")
    run.state.log.append("%d %s %.2e" % (n, n, lr))  # noqa: UP031
    run.state.log.append("{} {:>5}".format(n, n) + "|".join(map(str, range(n))))  # noqa: UP032
    run.state.log += [
        hex(n),
        bin(n),
        n.bit_length(),
        hash(n),
        int(str(n)),
        divmod(n, 3),
        n.__index__(),
    ]


def _file(run: Run, n: int) -> None:
    file = io.StringIO()
    print(f"step {n}", n, file=file, end="!")
    run.state.log.append(file.getvalue())


NUMBERS = (_member, _key, _table, _case, _range, _phase, _text, _file)


@pytest.mark.parametrize("use", NUMBERS, ids=lambda f: f.__name__.strip("_"))
def test_counters_are_keys_members_and_text(use: Callable[[Run, int], None]) -> None:
    def loop(run: Run) -> Any:
        n, run.state.log, run.state.history = 0, [], {}

        def step(x: Tensor, y: Tensor) -> Tensor:
            nonlocal n
            n += 1
            use(run, n)
            loss = update(run, F.cross_entropy(run.model(x), y))
            run.state.history[f"loss/{n}"] = run.state.history["last", n] = loss.detach()
            return loss

        return step

    trains(loop, ways=1)


def test_what_is_printed_is_that_of_eager(capsys: pytest.CaptureFixture[str]) -> None:
    def loop(run: Run) -> Any:
        n = 0

        def step(x: Tensor, y: Tensor) -> Tensor:
            nonlocal n
            n += 1
            loss = update(run, F.cross_entropy(run.model(x), y))
            print(f"step {n}", n, run.optimizer.param_groups[0]["lr"] / n)
            print(f"{loss.item():.6f}", loss.shape, loss.dtype, file=sys.stderr)
            return loss

        return step

    trains(loop)
    out, err = capsys.readouterr()
    for text in (out.splitlines(), err.splitlines()):
        assert len(text) == 2 * STEPS
        assert text[:STEPS] == text[STEPS:]
    assert len(set(out.splitlines())) == STEPS
