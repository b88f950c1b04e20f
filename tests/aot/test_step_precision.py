"""Steps in bfloat16: torch's own recipe of mixed precision, with float32 master weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import OptionError, compile_step
from tests.aot import step_nets as nets
from tests.aot.step_checks import assert_one_program, train
from tests.training import judging
from tests.training.stepping import OPTIMIZERS

BACKENDS = ("aot_eager", "openxla", pytest.param("inductor", marks=pytest.mark.long))


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    """The recipe as one writes it: around the forward pass and the loss alone."""
    with torch.autocast("cpu", torch.bfloat16):
        return nets.entropy(model, batch)


def calls_in_bfloat16(step: dynamo_backends.Step) -> set[str]:
    """Operators of the compiled graph that have results in bfloat16."""
    (program,) = step._programs.kept
    values = {str(n.target): n.meta["val"] for n in program.graph.calls}
    return {
        name for name, value in values.items() if getattr(value, "dtype", None) is torch.bfloat16
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_is_as_accurate_as_the_recipe_in_eager(backend: str, accumulate: int) -> None:
    batches, optimizer = nets.rows(4), OPTIMIZERS["sgd"]
    given = nets.mlp, optimizer, batches
    precise = train(*given, torch.float64, None, loss_of=nets.entropy)
    eager = train(*given, torch.float32, None, loss_of=under_autocast)
    settings = {"loss_of": nets.entropy, "accumulate": accumulate, "precision": "bf16"}
    ours = train(*given, torch.float32, backend, **settings)
    judging.assert_as_accurate(eager.everything(), ours.everything(), precise.everything(), [])
    assert ours.step is not None
    assert ours.step.compilations == 1
    assert calls_in_bfloat16(ours.step)


def test_all_that_stays_is_in_float32() -> None:
    model, images = nets.convnet(), nets.images(2)
    optimizer = torch.optim.AdamW(model.parameters())

    def function(batch: Any) -> Tensor:
        loss = nets.entropy(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step = compile_step(function, model=model, optimizer=optimizer, precision="bf16")
    losses = [step(batch) for batch in images]
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    kept = [*losses, *model.parameters(), *(p.grad for p in model.parameters()), *state]
    assert {t.dtype for t in kept} == {torch.float32}
    assert any("convolution_backward" in name or "mm" in name for name in calls_in_bfloat16(step))


class Recording(torch.optim.SGD):
    """Notes in which dtype its own products are computed."""

    dtypes: list[torch.dtype]

    def step(self, closure: Any = None) -> Any:
        weight = self.param_groups[0]["params"][0]
        self.dtypes.append((weight.detach() @ weight.detach().T).dtype)
        return super().step(closure)


@pytest.mark.parametrize("backend", ["aot_eager", "openxla"])
def test_backward_and_update_are_outside_of_autocast(backend: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = Recording(model.parameters(), 0.1)
    optimizer.dtypes = []
    seen: list[torch.dtype] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append((gradient.float().T @ gradient.float()).dtype)
            return gradient * 2

    def function(x: Tensor) -> Tensor:
        y = model(x)
        assert y.dtype is torch.bfloat16
        loss = Doubled.apply(y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    settings = {"backend": backend, "precision": "bf16"}
    step = compile_step(function, model=model, optimizer=optimizer, **settings)
    for _ in range(4):
        step(torch.randn(5, 4))
    assert step.launches >= 2
    assert len(seen) == 4
    assert set(seen) == {torch.float32}
    assert set(optimizer.dtypes) == {torch.float32}


def test_weights_are_read_anew_after_an_update() -> None:
    """Autocast's own cache would give the second forward pass the weights of the first."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        before = model(x).float().square().mean()
        before.backward()
        optimizer.step()
        optimizer.zero_grad()
        return before, model(x).float().square().mean()

    step = compile_step(function, model=model, optimizer=optimizer, precision="bf16")
    x = torch.randn(8, 4)
    expected, after = step(x)
    assert after < expected
    for _ in range(3):
        before, new = step(x)
        torch.testing.assert_close(before, after)
        assert new != before
        after = new
    assert_one_program(step, 4)


def test_what_the_function_takes_out_of_autocast_stays_in_float32() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = compile_step(function, model=model, optimizer=optimizer, precision="bf16")
    for _ in range(2):
        step(torch.randn(5, 4))
    assert not calls_in_bfloat16(step)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"precision": "fp16"}, "must be 'float32' or 'bf16', not 'fp16'"),
        ({"precision": torch.bfloat16}, "not torch.bfloat16"),
    ],
)
def test_what_cannot_be(settings: Any, said: str) -> None:
    model = nets.mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(OptionError, match=said):
        compile_step(lambda: None, model=model, optimizer=optimizer, **settings)
