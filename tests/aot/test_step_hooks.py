"""What runs inside of a backward pass: checkpoints of activations, and hooks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dynamo_backends
from tests.aot import step_nets as nets
from tests.aot.step_checks import assert_close, assert_one_program, compare

BACKENDS = ("aot_eager", "openxla")


class Checkpointed(nn.Module):
    """A net whose middle is computed again, and draws again, in the backward."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.3)
        x = checkpoint(self._draw, x, use_reentrant=self._use_reentrant)
        return self.last(F.dropout(x, 0.3))

    def _draw(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.middle(x)), 0.3) + torch.rand_like(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_checkpoints_draw_again_what_they_drew(use_reentrant: bool, backend: str) -> None:
    def build(dtype: torch.dtype) -> Any:
        model = Checkpointed(use_reentrant).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)

        def function(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return function, [model], [optimizer]

    batches = nets.rows(3)
    compare(build, batches, backend)
    following = torch.rand(3)
    function, _, _ = build(torch.float64)
    torch.manual_seed(1)
    for x, y in batches:
        function(x.double(), y)
    assert torch.equal(torch.rand(3), following), "capture leaves the generator as it was"


def hook_on_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return model[0].weight.register_hook(lambda g: g * model[0].bias.sum())


def hook_on_accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    names = {p: name for name, p in model.named_parameters()}

    def halve(p: Tensor) -> None:
        if "weight" in names[p]:
            p.grad.mul_(0.5)

    return model[0].weight.register_post_accumulate_grad_hook(halve)


def hook_on_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return model[0].register_forward_hook(lambda module, args, out: out * model[0].bias.exp())


def hook_on_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return model[2].register_full_backward_hook(lambda module, grads, _: (grads[0] * 3,))


def hook_on_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def clip(*_: Any) -> None:
        for p in model.parameters():
            p.grad.clamp_(-1e-3, 1e-3)

    return optimizer.register_step_pre_hook(clip)


HOOKS = (
    hook_on_gradient, hook_on_accumulated, hook_on_module, hook_on_backward, hook_on_optimizer,
)  # fmt: skip


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_of_all_kinds_come_and_go(register: Any, backend: str) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

        def function(
            x: Tensor, y: Tensor, model: Any = model, optimizer: Any = optimizer
        ) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step: Any = function
        if compiled:
            step = dynamo_backends.compile_step(
                function, model=model, optimizer=optimizer, backend=backend
            )
        batches = [(x.double(), y) for x, y in nets.rows(6)]
        losses = [step(*batch) for batch in batches[:2]]
        handle = register(model, optimizer)
        losses += [step(*batch) for batch in batches[2:4]]
        handle.remove()
        losses += [step(*batch) for batch in batches[4:]]
        found.append(torch.stack(losses))
    assert_close("losses", *found)
    # torch keeps in the module that it has had a backward hook.
    assert step.compilations == 2, "then as before"
    assert (step.launches, step.eager_steps, step.refusals) == (4, 2, {})


def test_optimizers_that_step_in_the_backward_pass() -> None:
    def build(dtype: torch.dtype) -> Any:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        optimizers = {p: torch.optim.AdamW([p], lr=0.01, eps=1e-4) for p in model.parameters()}

        def update(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)

        def function(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        return function, [model], list(optimizers.values())

    assert_one_program(compare(build, nets.rows(4)), 4)


@pytest.mark.parametrize(
    "pick",
    [
        list,
        pytest.param(
            dict,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13", reason="eager takes no dictionary before torch 2.13"
            ),
        ),
        lambda named: dict(named)["0.weight"],
    ],
)
def test_gradients_of_some_inputs_only(pick: Any) -> None:
    def build(dtype: torch.dtype) -> Any:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model[0].weight.register_hook(lambda g: g * model[0].bias.exp().sum())
        first = list(model[0].named_parameters("0"))
        inputs = [p for _, p in first] if pick is list else pick(first)

        def function(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward(inputs=inputs)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return function, [model], [optimizer]

    assert_one_program(compare(build, nets.rows(3), "aot_eager"), 3)


def test_gradients_of_no_inputs_are_eagers_error() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.weight.register_hook(lambda g: g * 2)

    def function(x: Tensor, inputs: Any) -> None:
        model(x).sum().backward(inputs=inputs)

    step = dynamo_backends.compile_step(
        function, model=model, optimizer=optimizer, backend="aot_eager"
    )
    x = torch.ones(2, 4)
    for run in (function, step):
        with pytest.raises(RuntimeError, match=r"cannot be empty"):
            run(x, [])
    assert model.weight.grad is None
