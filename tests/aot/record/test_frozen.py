"""Frozen steps: Python stops running, and what the step depends on is still compared."""

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends import compile_step
from dynamo_backends.interface.errors import StepCaptureError
from tests.aot.record.checks import Case, Run, assert_equal, batches, network

STEPS = 14
RECORDED = 3
"""How often Python runs for one kind of calls: recorded, compiled, compared."""


def frozen(loop: Any, **settings: Any) -> Case:
    """A loop whose Python does not change anything."""
    options = {"python": "frozen", "fallback": "error", **settings.pop("settings", {})}
    given: dict[str, Any] = {"steps": STEPS, "settings": options} | settings
    return Case(loop, **given)


def plain(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


class Residual(nn.Module):
    """Convolutions with batch norms, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """From images to classes."""
        x = F.relu(self.first(x), inplace=True)
        y = self.norm(self.conv(x))
        y += x
        result: Tensor = self.last(F.adaptive_avg_pool2d(F.relu(y), 1).flatten(1))
        return result


class Encoder(nn.Module):
    """Embeddings, two layers of attention with dropout, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """From tokens to classes."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x[:, 0])
        return result


def images(i: int, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn(2, 1, 5, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (2,), generator=generator)


def texts(i: int, generator: torch.Generator) -> tuple[Any, ...]:
    return tuple(torch.randint(0, 3, size, generator=generator) for size in ((2, 6), (2,)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


MODELS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "mlp-adamw": {"optimizer": adamw},
    "resnet": {"model": lambda: Residual().double(), "batch": images},
    "bert": {"model": lambda: Encoder().double(), "batch": texts, "optimizer": adamw},
}


def runs_of(step: Any) -> int:
    """How often Python has run."""
    return STEPS - int(step.frozen_calls)


@pytest.mark.parametrize("name", MODELS)
def test_python_runs_for_the_first_calls_alone(name: str) -> None:
    step = assert_equal(frozen(plain, **MODELS[name], steps=20))
    assert step.frozen_calls == 20 - RECORDED
    assert (step.eager_steps, step.compilations, step.launches) == (1, 1, 19)


@pytest.mark.parametrize("backend", ["openxla", "onnxrt"])
def test_frozen_steps_run_on_other_backends(backend: str) -> None:
    def loop(run: Run) -> Any:
        run.between = lambda i: set_rate(run, i)
        return plain(run)

    step = assert_equal(frozen(loop, optimizer=adamw), backend)
    assert runs_of(step) == RECORDED
    assert step.launches == STEPS - 1


def test_arguments_do_not_live_on() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = Run(model, optimizer)
    step: Any = compile_step(
        plain(run), model=model, optimizer=optimizer, backend="aot_eager", python="frozen"
    )
    for i in range(6):
        x, y = batches(i, torch.Generator().manual_seed(i))
        seen = weakref.ref(x)
        step(x, y)
        del x, y
        if i < RECORDED:
            gc.collect()  # a capture leaves cycles behind
        assert seen() is None
    assert step.frozen_calls == 6 - RECORDED


def test_what_python_does_besides_does_not_happen() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = []

    def train(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = compile_step(
        train, model=model, optimizer=optimizer, backend="aot_eager", python="frozen"
    )
    for i in range(6):
        step(*batches(i, torch.Generator().manual_seed(i)))
    assert len(calls) == RECORDED


# What changes around a step

Between = Callable[[Run, int], None]


def at(number: int, change: Callable[[Run], Any]) -> Between:
    def between(run: Run, i: int) -> None:
        if i == number:
            change(run)

    return between


def set_rate(run: Run, i: int) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + i)


def replace_weight(run: Run) -> None:
    old = run.model[0].weight
    new = nn.Parameter(old.detach() * 0.5)
    run.model[0].weight = new
    group = run.optimizer.param_groups[0]
    group["params"] = [new if p is old else p for p in group["params"]]
    run.optimizer.state.pop(old, None)


def replace_buffer(run: Run, i: int) -> None:
    run.model[1].scale = run.model[1].scale * 0.9


def load_all(run: Run) -> None:
    states = run.model.state_dict(), run.optimizer.state_dict()
    run.model.load_state_dict({k: v * 0.5 for k, v in states[0].items()})
    run.optimizer.load_state_dict(states[1])


def leave_gradients(run: Run) -> None:
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)


def set_decay(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.1


def other_layout(run: Run) -> None:
    p = run.model[0].weight
    p.data = p.data.t().contiguous().t()


class Scale(nn.Module):
    """Multiplies by a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return x * self.scale


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3)).double()


def with_scale() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), Scale(), nn.Linear(6, 3)).double()


CHANGES: dict[str, tuple[Between, dict[str, Any], int]] = {
    "a scheduler": (set_rate, {}, RECORDED),
    "a rate later": (at(9, lambda run: set_rate(run, 9)), {}, RECORDED + 1),
    "weight decay": (at(9, set_decay), {}, RECORDED + 2),
    "eval": (at(9, lambda run: run.model.eval()), {"model": with_dropout}, 2 * RECORDED),
    "eval and back": (
        lambda run, i: run.model.train(i not in (8, 9, 10, 14)) and None,
        {"model": with_dropout}, 2 * RECORDED,
    ),
    "a parameter": (at(9, replace_weight), {}, 2 * RECORDED),
    "a buffer at each call": (replace_buffer, {"model": with_scale}, RECORDED),
    "a frozen layer": (
        at(9, lambda run: run.model[0].requires_grad_(False)), {}, 2 * RECORDED
    ),
    "state reset": (at(9, lambda run: run.optimizer.state.clear()), {}, 2 * RECORDED),
    "state loaded": (at(9, load_all), {}, 2 * RECORDED),
    "state loaded, AdamW": (at(9, load_all), {"optimizer": adamw}, 2 * RECORDED),
    "gradients left": (at(9, leave_gradients), {}, 2 * RECORDED),
    "another layout": (at(9, other_layout), {}, 2 * RECORDED),
    "in place": (at(9, lambda run: run.model[0].weight.data.mul_(2)), {}, RECORDED),
    "float32": (at(9, lambda run: run.model.double()), {}, RECORDED),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_around_a_step_is_seen(name: str) -> None:
    between, settings, most = CHANGES[name]

    def loop(run: Run) -> Any:
        run.between = lambda i: between(run, i)
        return plain(run)

    step = assert_equal(frozen(loop, **settings))
    assert RECORDED <= runs_of(step) <= most


def test_sizes_have_variants_of_their_own() -> None:
    def batch(i: int, generator: torch.Generator) -> tuple[Any, ...]:
        rows = 3 + i % 3
        x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
        return x, torch.randint(0, 3, (rows,), generator=generator)

    step = assert_equal(frozen(plain, batch=batch, most_eager=4))
    assert runs_of(step) <= 3 * RECORDED


def test_modes_of_torch_are_compared() -> None:
    def loop(run: Run) -> Any:
        step = plain(run)

        def outer(x: Tensor, y: Tensor) -> Any:
            return step(x, y)

        return outer

    for context in (torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
        model = network()
        expected = network()
        expected.load_state_dict(model.state_dict())
        found = []
        for net, backend in ((expected, None), (model, "aot_eager")):
            forward: Any = lambda x, net=net: net(x).sum()  # noqa: E731
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            step = forward if backend is None else compile_step(
                forward, model=net, optimizer=optimizer, backend=backend, python="frozen"
            )  # fmt: skip
            results = []
            for i in range(12):
                x = batches(i, torch.Generator().manual_seed(i))[0]
                if i >= 6:
                    with context():
                        results.append(step(x).detach())
                else:
                    results.append(step(x).detach())
            found.append(torch.stack(results))
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


# Arguments


@dataclass
class Batch:
    """Inputs and classes."""

    x: Tensor
    y: Tensor
    weight: float = 1.0


def of_arguments(run: Run) -> Any:
    def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(batch, dict):
            batch = SimpleNamespace(weight=1.0, **batch)
        loss = F.cross_entropy(run.model(batch.x), batch.y) * batch.weight
        for factor in (*args, *kwargs.values()):
            loss = loss * factor if factor > 0.5 else loss + factor
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return {"loss": loss, "options": (args, "text", None)}

    return step


ARGUMENTS: dict[str, tuple[Callable[[int, Any], tuple[Any, ...]], int]] = {
    "a dataclass": (lambda i, xy: (Batch(*xy),), RECORDED),
    "its number": (lambda i, xy: (Batch(xy[0], xy[1], float(i % 2)),), 2 * RECORDED),
    "a namespace": (lambda i, xy: (SimpleNamespace(x=xy[0], y=xy[1], weight=2.0),), RECORDED),
    "a dict": (lambda i, xy: ({"x": xy[0], "y": xy[1]},), RECORDED),
    "integers": (lambda i, xy: (Batch(*xy), i % 2 + 1), 2 * RECORDED),
    "floats": (lambda i, xy: (Batch(*xy), (0.1, 0.7)[i % 2], 0.3), 2 * RECORDED),
    "flags": (lambda i, xy: (Batch(*xy), i % 2 == 0, 1), 2 * RECORDED),
    "a float that always changes": (lambda i, xy: (Batch(*xy), i / 10), STEPS),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_variants_of_their_own(name: str) -> None:
    make, most = ARGUMENTS[name]
    case = frozen(
        of_arguments, batch=lambda i, generator: make(i, batches(i, generator)), most_eager=4
    )
    step = assert_equal(case)
    assert runs_of(step) <= most


def of_two(run: Run) -> Any:
    def step(a: Tensor, b: Tensor) -> Any:
        with torch.no_grad():
            a.mul_(2)
            b.add_(1)
        loss = run.model(a + 3 * b).square().mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss, a, b

    return step


def test_arguments_that_share_memory_are_another_kind() -> None:
    def batch(i: int, generator: torch.Generator) -> tuple[Any, ...]:
        a, b = (torch.randn(5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
        return (a, a) if i in (5, 9) else (a, b)

    step = assert_equal(frozen(of_two, batch=batch))
    assert runs_of(step) == RECORDED + 2


def test_an_argument_that_cannot_be_compared_is_refused() -> None:
    def loop(run: Run) -> Any:
        step = plain(run)
        return lambda x, y, settings: step(x, y)

    def batch(i: int, generator: torch.Generator) -> tuple[Any, ...]:
        return *batches(i, generator), {1, 2}

    with pytest.raises(StepCaptureError, match="an argument that cannot be compared"):
        assert_equal(frozen(loop, batch=batch))
    step = assert_equal(frozen(loop, batch=batch, settings={"fallback": "split"}, eager=True))
    assert step.frozen_calls == 0


# Results


def returns(what: Callable[[Run, Tensor, Tensor], Any], clears: bool = True) -> Any:
    def loop(run: Run) -> Any:
        def step(x: Tensor, y: Tensor) -> Any:
            if not clears:
                run.optimizer.zero_grad()
            loss = F.cross_entropy(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            if clears:
                run.optimizer.zero_grad()
            return what(run, x, loss)

        return step

    return loop


RESULTS: dict[str, Any] = {
    "nothing": returns(lambda run, x, loss: None),
    "an object": returns(lambda run, x, loss: Batch(loss, x, 0.5)),
    "a weight": returns(lambda run, x, loss: [run.model[0].weight, loss]),
    "a view of a weight": returns(lambda run, x, loss: (run.model[0].weight[0], loss)),
    "views of a result": returns(lambda run, x, loss: (x * 2)[1:].split(2)),
    "a gradient": returns(lambda run, x, loss: run.model[0].weight.grad, clears=False),
    "one tensor twice": returns(lambda run, x, loss: {"a": loss, "b": [loss, -0.0, float("nan")]}),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_put_together_again(name: str) -> None:
    step = assert_equal(frozen(RESULTS[name]))
    assert runs_of(step) <= RECORDED + 1


def test_results_keep_their_identity() -> None:
    model: Any = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss, loss, model[0].weight, model[0].weight[0], model[0].weight.grad, x, [y]

    step: Any = compile_step(
        train, model=model, optimizer=optimizer, backend="aot_eager", python="frozen"
    )
    for i in range(8):
        x, y = batches(i, torch.Generator().manual_seed(i))
        first, second, weight, row, gradient, given, several = step(x, y)
        assert first is second
        assert weight is model[0].weight
        assert row.data_ptr() == weight.data_ptr()
        assert gradient is weight.grad
        assert given is x
        assert several[0] is y
    assert step.frozen_calls >= 3


# Tensors from elsewhere


def test_a_tensor_from_elsewhere_is_read_at_each_call() -> None:
    def loop(run: Run) -> Any:
        weights = torch.ones(3, dtype=torch.float64)

        def step(x: Tensor, y: Tensor) -> Tensor:
            scale = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
            loss = F.cross_entropy(run.model(x), y, weight=weights * scale)
            scale.mul_(3)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        def between(i: int) -> None:
            weights.add_(i)

        run.between = between
        return step

    step = assert_equal(frozen(loop))
    assert runs_of(step) <= RECORDED + 1


def test_a_tensor_that_is_always_another_one_is_refused_with_its_line() -> None:
    def loop(run: Run) -> Any:
        state = SimpleNamespace(mean=torch.zeros((), dtype=torch.float64))

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(run.model(x), y)
            state.mean = state.mean * 0.9 + loss.detach()
            (loss - state.mean).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        return step

    with pytest.raises(
        StepCaptureError, match=r"a different tensor at each call at .*test_frozen.py"
    ):
        assert_equal(frozen(loop))
    step = assert_equal(frozen(loop, settings={"fallback": "split"}, eager=True))
    assert step.frozen_calls == 0


def test_a_tensor_that_python_keeps_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def loop(run: Run) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(run.model(x), y)
            run.model.last = loss.detach()
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        return step

    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert_equal(frozen(loop))
    assert "stores a tensor in a Python object at" in caplog.text
    assert "test_frozen.py" in caplog.text


# Refusals


def reads(what: Callable[[Run, Tensor, Tensor], Any]) -> Any:
    def loop(run: Run) -> Any:
        def step(x: Tensor, y: Tensor) -> Any:
            loss = F.cross_entropy(run.model(x), y)
            what(run, x, loss)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        return step

    return loop


VALUES: dict[str, Callable[[Run, Tensor, Tensor], Any]] = {
    "item": lambda run, x, loss: loss.item(),
    "if": lambda run, x, loss: [] if loss > 3 else {},
    "of an argument": lambda run, x, loss: x.tolist(),
    "of a weight": lambda run, x, loss: run.model[0].weight[0, 0].item(),
    "print": lambda run, x, loss: f"{loss}",
    "a seed": lambda run, x, loss: torch.manual_seed(1),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_in_python_are_refused_with_their_line(name: str) -> None:
    loop = reads(VALUES[name])
    run = Run(network(), None)
    run.optimizer = adamw(run.model.parameters())
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    step = compile_step(
        loop(run), model=run.model, optimizer=run.optimizer, backend="aot_eager", python="frozen"
    )
    for _ in range(2):
        with pytest.raises(StepCaptureError, match=r"at .*test_frozen.py:\d+"):
            step(*batches(0, torch.Generator().manual_seed(0)))
    assert not run.optimizer.state
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    split = assert_equal(frozen(loop, settings={"fallback": "split"}, eager=True))
    assert split.frozen_calls == 0
    assert split.refusals


def counts(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        loss = F.cross_entropy(run.model(x), y) / run.state.n
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def returns_a_count(run: Run) -> Any:
    inner = counts(run)
    return lambda x, y: (inner(x, y), f"step {run.state.n}")


def schedules(run: Run) -> Any:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = plain(run)(x, y)
        scheduler.step()
        return loss

    return step


def accumulates(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        if run.state.n % 3 == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()
        return loss

    return step


def uses_the_rate(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = plain(run)(x, y)
        with torch.no_grad():
            run.model[0].weight.mul_(1 - run.optimizer.param_groups[0]["lr"] * 0.1)
        return loss

    run.between = lambda i: set_rate(run, i)
    return step


CHANGING = {
    "a number": (counts, "uses a Python scalar that changes from call to call at"),
    "the rate": (uses_the_rate, "uses a Python scalar that changes from call to call at"),
    "a scheduler": (schedules, "changes an optimizer setting"),
    "another way": (accumulates, "takes a different code path at each call"),
    "a result": (returns_a_count, "changes from call to call|returns something else"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_python_changes_at_each_call_is_refused(name: str) -> None:
    loop, message = CHANGING[name]
    with pytest.raises(StepCaptureError, match=message):
        assert_equal(frozen(loop))
    step = assert_equal(frozen(loop, settings={"fallback": "split"}, eager=True))
    assert step.frozen_calls == 0


def test_parts_of_a_batch_are_taken_within_one_call() -> None:
    def batch(i: int, generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
        return x, torch.randint(0, 3, (6,), generator=generator)

    model = network()
    expected = network()
    expected.load_state_dict(model.state_dict())
    results = []
    for net, python in ((expected, "replay"), (model, "frozen")):
        run = Run(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
        step: Any = compile_step(
            plain(run), model=net, optimizer=run.optimizer, backend="aot_eager", accumulate=2,
            python=python,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        results.append(torch.stack([step(*batch(i, generator)) for i in range(8)]))
    assert step.frozen_calls == 8 - RECORDED
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


def test_a_position_out_of_range_raises_eagers_error() -> None:
    model = nn.Embedding(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(ids: Tensor) -> Tensor:
        loss = model(ids).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step: Any = compile_step(
        train, model=model, optimizer=optimizer, backend="aot_eager", python="frozen"
    )
    for _ in range(5):
        step(torch.tensor([0, 4]))
    before = model.weight.detach().clone()
    with pytest.raises(IndexError):
        step(torch.tensor([0, 5]))
    assert torch.equal(model.weight, before)
    step(torch.tensor([0, 4]))
    assert step.frozen_calls == 3
