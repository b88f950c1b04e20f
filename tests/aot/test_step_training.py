"""What training loops do: each compared with eager over several steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamo_backends
from tests.aot import step_nets as nets
from tests.aot.step_checks import (
    assert_as_accurate_as_eager,
    assert_close,
    assert_equal_to_eager,
    assert_one_program,
    compare,
)
from tests.training.stepping import OPTIMIZERS

BACKENDS = ("aot_eager", "openxla")


def classifier(dtype: torch.dtype, loop: Callable[..., Any], **settings: Any) -> Any:
    model = nets.mlp().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **settings)
    return loop(model, optimizer), [model], [optimizer]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_batch_norm_dropout_clipping_and_a_schedule(optimizer: str, backend: str) -> None:
    step = assert_equal_to_eager(
        nets.convnet,
        OPTIMIZERS[optimizer],
        nets.images(10),
        backend,
        loss_of=nets.entropy,
        schedule=True,
        clip=0.5,
    )
    assert_one_program(step, 10)


@pytest.mark.long
def test_tied_weights_and_recurrence() -> None:
    assert_equal_to_eager(
        nets.Tied, OPTIMIZERS["adamw"], nets.sentences(4), "openxla", loss_of=nets.entropy
    )


def test_autocast_keeps_float32_masters() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=batch[0].dtype is torch.float32):
            return nets.entropy(model, batch)

    step = assert_as_accurate_as_eager(
        nets.mlp, OPTIMIZERS["adamw"], nets.rows(6), "openxla", loss_of=loss
    )
    report = next(step._programs.kept)
    assert any("bfloat16" in str(n.meta["val"].dtype) for n in report.graph.calls)


@pytest.mark.parametrize("where", ["first", "last", "never", "zeros"])
def test_gradients_that_stay_are_eagers(where: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def function(x: Tensor, y: Tensor) -> Tensor:
            if where == "first":
                optimizer.zero_grad()
            loss = nets.entropy(model, (x, y))
            loss.backward()
            optimizer.step()
            if where == "last":
                optimizer.zero_grad()
            if where == "zeros":
                model.zero_grad(set_to_none=False)
            return loss

        return function

    # Gradients that stay are not there in the first call: the second one is another way.
    step = compare(lambda d: classifier(d, loop), nets.rows(6))
    assert_one_program(step, 6, recorded=1 if where in ("first", "last") else 2)


@pytest.mark.parametrize("clear_at", ["beginning", "end"])
def test_accumulation_in_one_graph(clear_at: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def function(x: Tensor, y: Tensor) -> Tensor:
            if clear_at == "beginning":
                optimizer.zero_grad()
            loss = nets.entropy(model, (x, y))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if clear_at == "end":
                optimizer.zero_grad()
            return loss.detach()

        return function

    def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def function(x: Tensor, y: Tensor) -> Tensor:
            losses = []
            optimizer.zero_grad()
            for part in zip(x.chunk(3), y.chunk(3), strict=True):
                losses.append(nets.entropy(model, part))
                (losses[-1] / 3).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return torch.stack(losses).mean().detach()

        return function

    by_hand = compare(lambda d: classifier(d, parts), nets.rows(4), "aot_eager")
    model, optimizer = by_hand._definition.models[0], by_hand._definition.optimizers[0]
    torch.manual_seed(0)
    function, models, optimizers = classifier(torch.float64, loop)
    step = dynamo_backends.compile_step(function, model=models, optimizer=optimizers, accumulate=3)
    for x, y in nets.rows(4):
        step(x.double(), y)
    assert_one_program(step, 4)
    for name, value in model.state_dict().items():
        assert_close(name, value, models[0].state_dict()[name])
    del optimizer
    with pytest.raises(dynamo_backends.StepCaptureError, match="accumulate=3 does not divide"):
        step(torch.randn(7, 4, dtype=torch.float64), torch.zeros(7, dtype=torch.int64))


def test_accumulation_of_scaled_gradients() -> None:
    found = []
    for parts in (0, 3):
        torch.manual_seed(0)
        model = nets.mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

        def function(
            x: Tensor,
            y: Tensor,
            model: Any = model,
            optimizer: Any = optimizer,
            scaler: Any = scaler,
        ) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        step: Any = function
        if parts:
            step = dynamo_backends.compile_step(
                function, model=model, optimizer=optimizer, accumulate=parts, backend="aot_eager"
            )
        losses = [step(x.double(), y) for x, y in nets.rows(4, 6)]
        assert scaler.get_scale() == 64.0
        found.append(torch.stack([*losses, *(p.detach().sum() for p in model.parameters())]))
    assert_close("losses and parameters", *found)


def test_average_of_weights() -> None:
    def build(dtype: torch.dtype) -> Any:
        model = nets.convnet().to(dtype)
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def function(x: Tensor, y: Tensor) -> Tensor:
            loss = nets.entropy(model, (x, y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
            return loss

        return function, [model, average], [optimizer]

    assert compare(build, nets.images(4)).compilations == 1


def test_two_steps_over_shared_modules() -> None:
    """A generator and a discriminator, each with a step and an optimizer of its own."""

    def build(dtype: torch.dtype, compiled: bool) -> tuple[nn.Module, nn.Module, list[Tensor]]:
        torch.manual_seed(0)
        generator = nn.Linear(2, 4).to(dtype)
        critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)
        by_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
        by_generator = torch.optim.Adam(generator.parameters(), lr=0.01)

        def criticise(noise: Tensor, real: Tensor) -> Tensor:
            by_critic.zero_grad()
            fake = generator(noise).detach()
            loss = F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean()
            loss.backward()
            by_critic.step()
            return loss.detach()

        def generate(noise: Tensor) -> Tensor:
            by_generator.zero_grad()
            critic.zero_grad()
            loss = F.softplus(-critic(generator(noise))).mean()
            loss.backward()
            by_generator.step()
            critic.zero_grad()
            return loss.detach()

        steps: list[Any] = [criticise, generate]
        if compiled:
            models = [generator, critic]
            steps = [
                dynamo_backends.compile_step(criticise, model=models, optimizer=by_critic),
                dynamo_backends.compile_step(generate, model=models, optimizer=by_generator),
            ]
        torch.manual_seed(2)
        losses = []
        for _ in range(4):
            losses.append(steps[0](torch.randn(5, 2, dtype=dtype), torch.randn(5, 4, dtype=dtype)))
            losses.append(steps[1](torch.randn(5, 2, dtype=dtype)))
        if compiled:
            assert_one_program(steps[0], 4, recorded=2)  # the second time there are gradients
            assert_one_program(steps[1], 4)
        return generator, critic, losses

    expected, found = (build(torch.float64, compiled) for compiled in (False, True))
    torch.testing.assert_close(found[2], expected[2], rtol=1e-9, atol=1e-12)
    for e, f in zip(expected[:2], found[:2], strict=True):
        for name, value in e.state_dict().items():
            assert_close(name, value, f.state_dict()[name])


def test_arguments_of_all_kinds_and_a_tensor_by_closure() -> None:
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def function(x: Tensor, y: Tensor, smoothing: float, reduce: str, *, count: int = 2) -> Any:
            scores = model(x)
            loss = F.cross_entropy(scores, y, weight=weights, reduction=reduce)
            loss = (loss + smoothing * scores.square().mean()) / count
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return function

    batches = [
        (*batch, 0.1 * i, "mean" if i < 4 else "sum") for i, batch in enumerate(nets.rows(6))
    ]
    step = compare(lambda d: classifier(d, loop), batches, "aot_eager")
    # "mean" and "sum"; the number is an input
    assert (step.launches, step.compilations, step.eager_steps) == (4, 2, 2)
    assert len(step.divergences) == 1


def test_changes_that_need_another_graph_are_noticed() -> None:
    def build(dtype: torch.dtype) -> Any:
        model = nets.convnet().to(dtype)
        model.factor = 1.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        extra = nn.Parameter(torch.zeros(1, dtype=dtype))

        def function(x: Tensor, y: Tensor) -> Tensor:
            loss = nets.entropy(model, (x, y)) * model.factor
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        changes = [
            lambda: model[0].weight.requires_grad_(False),
            model.eval,
            lambda: setattr(model, "factor", 2.0),
            lambda: optimizer.add_param_group({"params": [extra], "lr": 0.1}),
        ]
        return function, model, optimizer, changes

    results, counts = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        function, model, optimizer, changes = build(torch.float64)
        step: Any = function
        if compiled:
            step = dynamo_backends.compile_step(
                function, model=model, optimizer=optimizer, backend="aot_eager"
            )
        torch.manual_seed(1)
        losses = []
        for i, (x, y) in enumerate(nets.images(15)):
            losses.append(step(x.double(), y).detach())
            if i % 3 == 2:
                if compiled:
                    counts.append((step.eager_steps, step.compilations, step.launches))
                for change in changes[i // 3 : i // 3 + 1]:
                    change()
        results.append((losses, model.state_dict()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)
    # Each time a step in eager, and a program for the others; a number becomes an input.
    assert counts == [(1, 1, 2), (2, 2, 4), (3, 3, 6), (3, 4, 9), (4, 5, 11)]
    assert step.refusals == {}


def test_new_shape_is_compiled_once() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def function(x: Tensor, y: Tensor) -> Tensor:
            loss = nets.entropy(model, (x, y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return function

    batches = [*nets.rows(2), *nets.rows(2, batch=3), *nets.rows(2), *nets.rows(1, batch=3)]
    step = compare(lambda d: classifier(d, loop), batches, "aot_eager")
    assert (step.compilations, step.recompiles, step.launches, step.eager_steps) == (2, 1, 5, 2)


def test_lists_of_tensors_are_returned_as_they_are() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def function(x: Tensor, y: Tensor) -> Any:
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return {"loss": loss, "scores": [scores, scores.t()], "count": 3, "w": model[0].weight}

        return function

    torch.manual_seed(0)
    function, models, optimizers = classifier(torch.float64, loop)
    step = dynamo_backends.compile_step(function, model=models, optimizer=optimizers)
    twin = copy.deepcopy(models[0])
    x, y = nets.rows(1)[0]
    result = step(x.double(), y)
    torch.testing.assert_close(result["scores"][0], twin(x.double()).detach())
    torch.testing.assert_close(result["scores"][1], twin(x.double()).detach().t())
    assert result["count"] == 3
    assert result["w"] is models[0][0].weight
    assert not result["loss"].requires_grad
