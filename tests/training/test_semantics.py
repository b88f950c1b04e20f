"""What people do around a backward: checkpoints, autocast, hooks, frozen and tied weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dynamo_backends
from tests.checking import assert_same
from tests.training.helpers import agree, gradients, squares
from tests.training.test_gradients import saved_tensors

OPENXLA = dynamo_backends.compiler("openxla")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


class Blocks(nn.Module):
    """Two blocks, computed again in the backward if asked to be."""

    def __init__(self, again: bool, dropout: float = 0.0):
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 8))
            for _ in range(2)
        )
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


@pytest.mark.parametrize("partitioner", ["default", "min_cut"])
def test_a_checkpoint_saves_less_and_computes_again(partitioner: str):
    x = torch.randn(4, 8, requires_grad=True)
    sizes = {}
    for again in (False, True):
        module = Blocks(again)
        agree(module, x, partitioner=partitioner)
        compiler = dynamo_backends.compiler("openxla", partitioner=partitioner)
        saved = saved_tensors(torch.compile(module, backend=compiler)(x))
        sizes[again] = sum(t.numel() for t in saved)
        torch._dynamo.reset()
    assert sizes[True] < sizes[False]


def test_a_checkpoint_with_dropout_uses_the_same_mask_again():
    module = Blocks(again=True, dropout=0.5)
    reports = agree(module, torch.randn(4, 8, requires_grad=True), ops_in_eager=None)
    assert {r.kind for r in reports} == {"forward", "backward"}
    assert sum(r.ops_on_backend for r in reports) > 0


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_autocast_to_bfloat16(inside: bool):
    module = net()

    def forward(function: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(x)

    compiled = torch.compile((lambda x: forward(module, x)) if inside else module, backend=OPENXLA)
    x = torch.randn(8, 6, requires_grad=True)
    ours = gradients(
        module, compiled, x, squares if inside else lambda f, x: forward(f, x).square().sum()
    )
    theirs = gradients(module, module, x, lambda f, x: forward(f, x).square().sum())
    assert ours["0.weight"].dtype == torch.float32
    twin = copy.deepcopy(module).double()
    assert_same(theirs, ours, gradients(twin, twin, x.detach().double().requires_grad_()))


def test_hooks_see_and_change_gradients():
    def run(compile_it: bool) -> tuple[list[Any], dict[str, Any]]:
        torch.manual_seed(0)
        module, seen = net(), []
        function = torch.compile(module, backend=OPENXLA) if compile_it else module
        module[0].weight.register_hook(lambda g: seen.append(g.sum()) or g * 2)
        module[3].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))

        def loss(function: Any, x: Tensor) -> Tensor:
            y = function(x)
            y.register_hook(lambda g: seen.append(g.sum()) or g.clamp(-0.5, 0.5))
            return y.square().sum()

        return seen, gradients(module, function, torch.linspace(-1, 1, 30).view(5, 6), loss)

    (ours_seen, ours), (seen, theirs) = run(True), run(False)
    assert len(seen) == 3
    torch.testing.assert_close(sorted(ours_seen), sorted(seen))
    torch.testing.assert_close(ours, theirs)


def test_module_hooks_are_captured():
    def run(compile_it: bool) -> tuple[list[Any], dict[str, Any]]:
        torch.manual_seed(0)
        module, seen = net(), []
        module[1].register_full_backward_hook(lambda m, i, o: seen.append(o[0].sum()))
        function = torch.compile(module, backend=OPENXLA) if compile_it else module
        return seen, gradients(module, function, torch.linspace(-1, 1, 30).view(5, 6))

    (ours_seen, ours), (seen, theirs) = run(True), run(False)
    torch.testing.assert_close(ours, theirs)
    assert len(ours_seen) == len(seen) == 1
    torch.testing.assert_close(ours_seen, seen)


def test_gradients_accumulate():
    module = net()
    compiled = torch.compile(module, backend=OPENXLA)
    batches = torch.randn(3, 5, 6)

    def accumulated(function: Any) -> list[Tensor]:
        module.zero_grad()
        for x in batches:
            (squares(function, x) / 3).backward()
        return [p.grad.clone() for p in module.parameters()]

    ours, theirs = accumulated(compiled), accumulated(module)
    torch.testing.assert_close(ours, theirs)
    kept = [p.grad.data_ptr() for p in module.parameters()]
    squares(compiled, batches[0]).backward()
    assert kept == [p.grad.data_ptr() for p in module.parameters()], "added up where they were"


def test_frozen_submodules_get_no_gradient_and_cost_none():
    whole, frozen = net(), net()
    frozen[0].requires_grad_(False)
    counts = []
    for module in (whole, frozen):
        reports = agree(module, torch.randn(5, 6))
        counts.append(next(r.ops_on_backend for r in reports if r.kind == "backward"))
        torch._dynamo.reset()
    assert frozen[0].weight.grad is None
    assert frozen[3].weight.grad is not None
    assert counts[1] < counts[0]


def test_thawed_weights_get_gradients():
    module, x = net(), torch.randn(5, 6)
    module[0].requires_grad_(False)
    compiled = torch.compile(module, backend=OPENXLA)
    assert gradients(module, compiled, x)["0.weight"] is None
    module[0].requires_grad_(True)
    ours, theirs = gradients(module, compiled, x), gradients(module, module, x)
    torch.testing.assert_close(ours, theirs)
    assert ours["0.weight"] is not None


def test_tied_weights_get_the_sum_of_their_gradients():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).tanh())

    agree(Tied(), torch.randint(0, 11, (4, 3)))


def test_weights_that_change_between_forward_and_backward_are_noticed():
    module, x = net(), torch.randn(5, 6)
    compiled = torch.compile(module, backend=OPENXLA)
    squares(compiled, x).backward()
    loss = squares(compiled, x)
    with torch.no_grad():
        module[3].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Said by Dynamo's own look at the loss, between two of the graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_compiled_function_that_trains(name: str):
    """The form `torch.compile(train_step)`, with backward and optimizer inside."""
    makers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }

    def trained(backend: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        module = net().double()
        optimizer = makers[name](module.parameters())

        def train(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        torch._dynamo.reset()
        step = torch.compile(train, backend=backend) if backend else train
        x, y = torch.randn(5, 6).double(), torch.randn(5, 4).double()
        losses = [step(x, y) for _ in range(10)]
        state = [v for s in optimizer.state.values() for v in s.values() if v is not None]
        return losses, [p.detach() for p in module.parameters()], state

    with dynamo_backends.record() as reports:
        ours = trained(OPENXLA)
    # Where Adam's step is compiled, torch traces its bias correction in float32.
    exact, rounded = (1e-6, 1e-4) if name == "adamw" else (1e-9, 1e-9)
    torch.testing.assert_close(ours, trained("aot_eager"), rtol=exact, atol=exact)
    torch.testing.assert_close(ours, trained(None), rtol=rounded, atol=rounded)
    kinds = [r.kind for r in reports if r.ops_on_backend]
    assert {"forward", "backward"} <= set(kinds)
    assert "inference" in kinds, "the optimizer's update is a graph of its own"
    assert [f.op for r in reports for f in r.fallbacks] == []
    assert not any(r.runtime_fallbacks for r in reports)
