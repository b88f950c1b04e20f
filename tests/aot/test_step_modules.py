"""What training code does beside plain layers: scaled losses, computed weights, torch.func."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import dynamo_backends
from dynamo_backends.interface.errors import StepCaptureError
from tests.aot import step_nets as nets
from tests.aot.step_backends import BACKENDS
from tests.aot.step_checks import assert_close, assert_one_program, compare

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated"),  # torch's own, by jvp
]


Model = nn.Module
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Reparametrized(nn.Module):
    """Weights that are computed of others before each call, in all the ways of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weighed = nn.utils.weight_norm(nn.Linear(4, 8))
        self.bounded = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.weighed_anew = parametrizations.weight_norm(nn.Linear(8, 8))
        self.bounded_anew = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.pruned = prune.l1_unstructured(nn.Linear(8, 8), "weight", amount=0.3)
        self.pruned = prune.random_structured(self.pruned, "weight", amount=1, dim=0)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.weighed(x))
        for layer in (self.bounded, self.weighed_anew, self.bounded_anew, self.pruned):
            x = x + layer(x)
        return self.last(x)


class Normalized(nn.Module):
    """Averages that weigh all batches alike, and rows of bounded length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, max_norm=0.5)
        self.norm = nn.BatchNorm1d(4, momentum=None)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0].abs() * 5).long().clamp(0, 9)
        return self.last(self.norm(x + self.table(rows)))


def training(make: Callable[[], Model], loss_of: Any = None) -> Any:
    """For `compare`: makes a step function, modules and optimizers."""

    def build(dtype: torch.dtype) -> Any:
        model = make().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def function(x: Tensor, y: Tensor, *rest: Any) -> Tensor:
            given = F.cross_entropy(model(x), y) if loss_of is None else loss_of(model, x, y, *rest)
            given.backward()
            optimizer.step()
            optimizer.zero_grad()
            return given.detach()

        return function, [model], [optimizer]

    return build


@pytest.mark.parametrize("make", [Reparametrized, Normalized])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_averages_that_are_computed(make: Any, backend: str) -> None:
    step = compare(training(make), nets.rows(4), backend)
    if make is Reparametrized:
        assert_one_program(step, 4)
        return
    # A counter of batches is read before each of them; its reciprocal is an input.
    counts = step.cuts, step.compilations, step.launches, step.eager_steps, step.refusals
    assert counts == (1, 2, 6, 1, {})


def test_computed_weights_are_left_as_eager_leaves_them() -> None:
    left = []
    for compiled in (False, True):
        torch.manual_seed(0)
        function, [model], [optimizer] = training(Reparametrized)(torch.float64)
        step = function
        if compiled:
            step = dynamo_backends.compile_step(
                function, model=model, optimizer=optimizer, backend="aot_eager"
            )
        for x, y in nets.rows(3):
            step(x.double(), y)
        layers = (model.weighed, model.bounded, model.pruned)
        with torch.no_grad():
            model.eval()
            inference = model(torch.ones(2, 4, dtype=torch.float64))
        left.append([*(layer.weight.detach() for layer in layers), inference])
    for eager, ours in zip(*left, strict=True):
        assert_close("weight", eager, ours)


def test_parametrizations_that_are_cached() -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).mT

    def make() -> Model:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        return model

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached():
            return F.cross_entropy(model(x), y) + model[0].weight.square().sum()

    assert_one_program(compare(training(make, loss_of), nets.rows(3), "aot_eager"), 3)


def scaled(unscale: bool, optimize: Any) -> Any:
    """A step by a scaler, whose scale grows, and shrinks where gradients are infinite."""

    def build(dtype: torch.dtype) -> Any:
        model = nets.mlp().to(dtype)
        optimizer = optimize(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

        def function(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x * factor), y)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return torch.cat([p.detach().flatten() for p in model.parameters()])

        model.scaler = scaler
        return function, [model], [optimizer]

    return build


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True)


@pytest.mark.parametrize(
    ("unscale", "optimize", "backend"),
    [
        (False, sgd, "aot_eager"),
        (True, sgd, "openxla"),
        pytest.param(False, adam, "inductor", marks=pytest.mark.long),
        (True, adam, "aot_eager"),
        (False, fused, "aot_eager"),
    ],
)
def test_losses_that_are_scaled(unscale: bool, optimize: Any, backend: str) -> None:
    factors = torch.ones(6)
    factors[2] = torch.inf
    batches = [(*batch, f) for batch, f in zip(nets.rows(6), factors, strict=True)]
    scales, counts = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        function, [model], [optimizer] = scaled(unscale, optimize)(torch.float64)
        step = function
        if compiled:
            step = dynamo_backends.compile_step(
                function, model=model, optimizer=optimizer, backend=backend
            )
        found = []
        for i, (x, y, factor) in enumerate(batches):
            if i == 4:
                model.scaler.set_growth_factor(3.0)
            parameters = step(x.double(), y, factor.double())
            found += [parameters, torch.tensor(model.scaler.get_scale())]
        scales.append(found)
        states = optimizer.state_dict()["state"].values()
        counts.append([state.get("step") for state in states])
    for eager, ours in zip(*scales, strict=True):
        assert torch.isfinite(eager).all()
        assert_close("parameters or scale", eager, ours)
    assert counts[0] == counts[1], "steps that overflow do not count"
    counts = step.launches, step.compilations, step.eager_steps
    assert counts == (4, 2, 2), "the growth factor is a constant"
    assert (step.cuts, step.refusals) == (0, {})


def test_a_scale_that_is_updated_elsewhere() -> None:
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nets.mlp().double()
        optimizer = sgd(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

        def function(
            x: Tensor, y: Tensor, model: Any = model, optimizer: Any = optimizer, s: Any = scaler
        ) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            s.scale(loss).backward()
            s.step(optimizer)
            optimizer.zero_grad()
            return loss.detach()

        step: Any = function
        if compiled:
            step = dynamo_backends.compile_step(
                function, model=model, optimizer=optimizer, backend="aot_eager"
            )
        found = []
        for i, (x, y) in enumerate(nets.rows(6)):
            found.append(step(x.double() * (torch.inf if i == 3 else 1.0), y))
            scaler.update()
            found.append(torch.tensor(scaler.get_scale()))
        outcomes.append([*found, *model.state_dict().values()])
    torch.testing.assert_close(*reversed(outcomes), rtol=1e-9, atol=1e-12, equal_nan=True)
    assert outcomes[0][-5].item() == 32.0, "it has grown, shrunk, and grown again"
    assert_one_program(step, 6, recorded=2)  # the first call makes the scale


def gradient_penalty(model: Any, x: Tensor, y: Tensor) -> Tensor:
    gradient = torch.func.grad(lambda x: model(x).square().sum())(x)
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    penalty = gradient.square().sum() + jacobian.square().mean() + tangent.square().mean()
    return F.cross_entropy(torch.func.vmap(model)(x), y) + penalty


def learning_to_learn(model: Any, x: Tensor, y: Tensor) -> Tensor:
    def loss_of(parameters: Any) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    parameters = dict(model.named_parameters())
    gradients = torch.func.grad(loss_of)(parameters)
    return loss_of({name: p - 0.1 * gradients[name] for name, p in parameters.items()})


def one_gradient_per_sample(model: Any, x: Tensor, y: Tensor) -> Tensor:
    def loss_of(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (x[None],))
        return F.cross_entropy(logits, y[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(parameters, x, y)
    norms = sum(g.flatten(1).square().sum(1) for g in gradients.values())
    weights = 1 / (1 + norms.sqrt())
    return (F.cross_entropy(model(x), y, reduction="none") * weights).mean()


@pytest.mark.parametrize(
    ("loss_of", "backend"),
    [
        (gradient_penalty, "aot_eager"),
        (gradient_penalty, "openxla"),
        (learning_to_learn, "aot_eager"),
        pytest.param(learning_to_learn, "inductor", marks=pytest.mark.long),
        (one_gradient_per_sample, "aot_eager"),
        (one_gradient_per_sample, "openxla"),
    ],
)
def test_transforms_of_functions(loss_of: LossOf, backend: str) -> None:
    step = compare(training(nets.mlp, loss_of), nets.rows(3), backend)
    assert (step.launches, step.compilations, step.eager_steps) == (2, 1, 1)
    assert (step.refusals, step.cuts) == ({}, 0)


def in_tensors(model: Any, x: Tensor, y: Tensor, p: float) -> Tensor:
    """Numbers in places where a tensor can stand."""
    weights = torch.full((3,), p, dtype=x.dtype) * torch.tensor([p, 2 * p, 1.0])
    weights = weights + torch.full_like(weights, p) + x.new_full((3,), p).to(x)
    logits = model(x * p + (1 - p) * x.flip(0)) * weights
    return F.cross_entropy(logits, y) * max(p, 0.1) + torch.lerp(logits, x[:, :3], p).mean()


def in_settings(model: Any, x: Tensor, y: Tensor, p: float) -> Tensor:
    """Numbers that only a number can be."""
    logits = F.leaky_relu(model(F.dropout(x, p)), p) + F.elu(x[:, :3], alpha=p)
    counts = y * p + torch.clamp(y, max=p) + torch.pow(y, p)
    assert counts.dtype == torch.float32
    return (F.cross_entropy(logits, y, label_smoothing=p, reduction="none") * counts).sum()


@pytest.mark.parametrize(
    ("loss_of", "backend", "compilations"),
    [
        (in_tensors, "aot_eager", 1),
        (in_tensors, "openxla", 1),
        (in_settings, "aot_eager", 2),
        (in_settings, "openxla", 2),
    ],
)
def test_numbers_among_the_arguments(loss_of: Any, backend: str, compilations: int) -> None:
    numbers = (0.2, 0.3, 0.4, 0.4)
    batches = [(*batch, p) for batch, p in zip(nets.rows(4), numbers, strict=True)]
    step = compare(training(nets.mlp, loss_of), batches, backend)
    assert (step.launches, step.compilations, step.eager_steps) == (3, compilations, 1)


def sparse_table() -> nn.Module:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 3, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table((x[:, 0].abs() * 5).long().clamp(0, 9))

    return Table()


def test_sparse_gradients() -> None:
    def build(dtype: torch.dtype) -> Any:
        model = sparse_table().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def function(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return function, [model], [optimizer]

    assert_one_program(compare(build, nets.rows(3), "aot_eager"), 3)
    first, second = nets.rows(2)
    for backend in ("openxla", "inductor"):
        function, [model], [optimizer] = build(torch.float32)
        step = dynamo_backends.compile_step(
            function, model=model, optimizer=optimizer, backend=backend
        )
        step(*first)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(StepCaptureError, match=r"sparse tensors, .* at .*loss\.backward\(\)"):
            step(*second)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    lazy = torch.optim.SparseAdam(list(model.parameters()))
    with pytest.raises(StepCaptureError, match=r"SparseAdam counts .*sparse=False.*split"):
        dynamo_backends.compile_step(function, model=model, optimizer=lazy, backend="aot_eager")
