"""The state of models, optimizers and gradients, changed around and in a compiled step."""

import copy
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.aot.step_backends import BACKENDS
from tests.aot.step_loops import World, assert_equal, momentum, network


def _plain(world: World) -> Any:
    return lambda x, y: world.update(world.loss(x, y))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}).double()

    def forward(self, x: Tensor, head: str = "a") -> Tensor:
        return self.heads[head](x)


def _one_head(world: World) -> Any:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return world.update(F.cross_entropy(world.model(x, "a"), y))

    return function


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_parameters_that_the_step_does_not_use(backend: str) -> None:
    def between(world: World, i: int) -> None:
        if i in (1, 3):
            for p in world.model.heads["b"].parameters():  # type: ignore[index]
                p.grad = torch.ones_like(p)

    step = assert_equal(_one_head, between, backend=backend, model=TwoHeads)
    assert step.compilations <= 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_zeros_are_gradients(backend: str) -> None:
    def make(world: World) -> Any:
        def function(x: Tensor, y: Tensor, head: str) -> Tensor:
            loss = F.cross_entropy(world.model(x, head), y)
            loss.backward()
            world.optimizer.step()
            world.optimizer.zero_grad(set_to_none=False)
            return loss

        return function

    def batch(i: int, generator: torch.Generator) -> tuple[Tensor, Tensor, str]:
        x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
        return x, torch.randint(0, 3, (5,), generator=generator), "aaba"[i % 4]

    assert_equal(make, backend=backend, model=TwoHeads, batch=batch, steps=8)


def _scheduler_after(world: World) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 2, 0.5)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = world.update(world.loss(x, y))
        scheduler.step()
        return loss

    return function


def _several_schedulers(world: World) -> Any:
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(world.optimizer, lambda n: 1 / (1 + n)),
        torch.optim.lr_scheduler.CosineAnnealingLR(world.optimizer, 5),
    ]
    world.data.schedulers_seen = 0

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = world.update(world.loss(x, y))
        for scheduler in schedulers:
            scheduler.step()
            world.data.schedulers_seen += 1
        return loss

    return function


def _plateau(world: World) -> Any:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(world.optimizer, patience=0)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = world.update(world.loss(x, y))
        scheduler.step(loss.detach())
        return loss

    return function


def _by_hand(world: World) -> Any:
    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = world.update(world.loss(x, y))
        for group in world.optimizer.param_groups:
            group["lr"] *= 0.5
        return loss

    return function


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [_scheduler_after, _several_schedulers, _plateau, _by_hand])
def test_the_learning_rate_may_be_changed_by_the_step(make: Any, backend: str) -> None:
    step = assert_equal(make, backend=backend)
    assert step.compilations <= 3


def _clamped(world: World) -> Any:
    weight = world.model[0].weight  # type: ignore[index]

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = world.update(world.loss(x, y))
        weight.data = weight.data.clamp(-0.1, 0.1)
        return loss

    return function


def _descent_by_hand(world: World) -> Any:
    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = world.loss(x, y)
        loss.backward()
        for p in world.model.parameters():
            p.data = p.data - 0.1 * p.grad
            p.grad = None
        return loss

    return function


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [_clamped, _descent_by_hand])
def test_data_may_be_replaced_by_the_step(make: Any, backend: str) -> None:
    plain = lambda parameters: torch.optim.SGD(parameters, 0.1)  # noqa: E731
    assert_equal(make, backend=backend, optimizer=plain)


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))
        self.double()


def _images(i: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (5,), generator=generator)


@pytest.mark.parametrize("backend", BACKENDS)
def test_data_may_be_replaced_with_another_layout(backend: str) -> None:
    def between(world: World, i: int) -> None:
        if i == 1:
            world.model.to(memory_format=torch.channels_last)

    step = assert_equal(_plain, between, backend=backend, model=Convolutional, batch=_images)
    assert step.compilations == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_data_may_be_transposed_where_it_is(backend: str) -> None:
    def between(world: World, i: int) -> None:
        if i == 2:
            weight = world.model[0].weight  # type: ignore[index]
            weight.data = weight.data.t()

    square = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()  # noqa: E731
    assert_equal(_plain, between, backend=backend, model=square)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_may_change_its_dtype(backend: str) -> None:
    def make(world: World) -> Any:
        def function(x: Tensor, y: Tensor) -> Tensor:
            weight = world.model[0].weight  # type: ignore[index]
            return world.update(world.loss(x.to(weight.dtype), y)).double()

        return function

    def between(world: World, i: int) -> None:
        if i == 2:
            world.model.double()

    single = lambda: network().float()  # noqa: E731
    plain = lambda parameters: torch.optim.SGD(parameters, 0.1)  # noqa: E731
    step = assert_equal(
        make, between, backend=backend, model=single, optimizer=plain, steps=6, tolerance=1e-6
    )
    assert (step.compilations, step.launches, step.eager_steps) == (2, 4, 2)


def _relu_for_tanh(model: Any) -> None:
    model[1] = nn.ReLU()


def _new_linear(model: Any) -> None:
    torch.manual_seed(5)
    model[2] = nn.Linear(8, 3).double()


def _own_forward(model: Any) -> None:
    model[1].forward = MethodType(lambda self, x: torch.sigmoid(x), model[1])


def _flag(model: Any) -> None:
    model[1].inplace = True


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", [_relu_for_tanh, _new_linear, _own_forward, _flag])
def test_modules_and_methods_may_be_replaced(change: Any, backend: str) -> None:
    def between(world: World, i: int) -> None:
        if i == 2:
            change(world.model)

    step = assert_equal(_plain, between, backend=backend)
    # Nobody clears the gradients of the new layer: they come in one call, and stay. No torch call
    # has the flag.
    programs, ways = {_new_linear: (2, 3), _flag: (1, 1)}.get(change, (2, 2))
    counts = step.compilations, step.eager_steps, step.launches
    assert counts == (programs, ways, 6 - ways)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_a_module_calls_may_be_replaced(backend: str) -> None:
    class Own(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*network())
            self.activation: Any = torch.tanh

        def forward(self, x: Tensor) -> Tensor:
            hidden = self[0](x)
            if getattr(self, "doubled", False):
                hidden = hidden * 2
            return self[2](self.activation(hidden))

    def between(world: World, i: int) -> None:
        if i == 1:
            world.model.activation = torch.relu
        if i == 3:
            world.model.doubled = True

    step = assert_equal(_plain, between, backend=backend, model=Own)
    assert step.compilations == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_other_leaves_accumulate(backend: str) -> None:
    def make(world: World) -> Any:
        world.data.scale = torch.ones(4, dtype=torch.float64, requires_grad=True)

        def function(x: Tensor, y: Tensor) -> Tensor:
            return world.update(world.loss(x * world.data.scale, y))

        return function

    def between(world: World, i: int) -> None:
        setattr(world.data, f"gradient_{i}", world.data.scale.grad.clone())

    assert_equal(make, between, backend=backend, steps=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_the_batch_are_left_there(backend: str) -> None:
    batches: list[Tensor] = []

    def make(world: World) -> Any:
        world.data.gradients = []
        return lambda x, y: world.update(world.loss(x, y))

    def batch(i: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(5, 4, dtype=torch.float64, generator=generator).requires_grad_()
        y = torch.randint(0, 3, (5,), generator=generator)
        if i % 2:
            x = batches[-1]  # its gradients accumulate
        batches.append(x)
        return x, y

    def between(world: World, i: int) -> None:
        world.data.gradients.append(batches[-1].grad.clone())

    assert_equal(make, between, backend=backend, batch=batch)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_layers_may_be_frozen_and_unfrozen(optimizer: Any, backend: str) -> None:
    def model() -> nn.Module:
        net = network()
        net[0].requires_grad_(False)
        return net

    def between(world: World, i: int) -> None:
        layers: Any = world.model
        if i == 2:
            layers[0].requires_grad_(True)
        if i == 4:
            layers[2].requires_grad_(False)

    step = assert_equal(_plain, between, backend=backend, model=model, optimizer=optimizer, steps=7)
    assert step.compilations == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_parameters_may_be_added(optimizer: Any, backend: str) -> None:
    def between(world: World, i: int) -> None:
        if i == 1:
            world.optimizer.add_param_group(
                {"params": list(world.model.heads["b"].parameters()), "lr": 0.05}  # type: ignore[index]
            )

    def make(world: World) -> Any:
        def function(x: Tensor, y: Tensor) -> Tensor:
            model = world.model
            return world.update(F.cross_entropy(model(x, "a") + model(x, "b"), y))

        return function

    assert_equal(
        make,
        between,
        backend=backend,
        model=TwoHeads,
        optimizer=lambda parameters: optimizer(list(parameters)[:2]),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", ["momentum", "nesterov", "weight_decay", "maximize"])
def test_settings_may_be_switched_on(key: str, backend: str) -> None:
    def between(world: World, i: int) -> None:
        if i == 2:
            world.optimizer.param_groups[0]["momentum"] = 0.5
            world.optimizer.param_groups[0][key] = {"momentum": 0.9, "weight_decay": 0.1}.get(
                key, True
            )

    plain = lambda parameters: torch.optim.SGD(parameters, 0.1)  # noqa: E731
    assert_equal(_plain, between, backend=backend, optimizer=plain)


def test_state_may_be_loaded_in_the_middle() -> None:
    def between(world: World, i: int) -> None:
        if i == 1:
            world.data.kept = copy.deepcopy(
                (world.model.state_dict(), world.optimizer.state_dict())
            )
        if i == 3:
            world.model.load_state_dict(world.data.kept[0])
            world.optimizer.load_state_dict(world.data.kept[1])
            world.data.kept = None

    assert_equal(_plain, between, backend="aot_eager", optimizer=adamw)


def test_variants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamo_backends.aot.step.program import step_programs as steps

    monkeypatch.setattr(steps, "MAX_VARIANTS", 2)

    def batch(i: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = (3, 4, 5, 3, 4, 3, 5, 3, 4)[i]
        x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
        return x, torch.randint(0, 3, (rows,), generator=generator)

    step = assert_equal(_plain, backend="aot_eager", batch=batch, steps=9)
    # The first three are recorded. Three rows stay then, since they are used most recently.
    assert (step.eager_steps, step.launches, step.compilations) == (3, 6, 4)
