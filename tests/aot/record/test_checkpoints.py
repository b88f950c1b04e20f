"""Steps by replay: activation checkpoints, whose functions run again in the backward pass."""

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from dynamo_backends import compile_step
from tests.aot.record.checks import Case, Run, assert_equal, batches
from tests.aot.record.test_functions import Swish
from tests.aot.record.test_training import clips, plain


class Block(nn.Module):
    """What is checkpointed."""

    def __init__(self, width: int, log: list[Any]):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.log = log
        self.rate = 0.3

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.log.append((self.training, torch.is_grad_enabled(), tuple(x.shape)))
        hidden = F.dropout(torch.tanh(self.up(self.norm(x))), self.rate, self.training)
        return x + scale * F.dropout(self.down(hidden), self.rate, self.training)


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self, call: Any = None, block: Any = Block, count: int = 3):
        super().__init__()
        self.log: list[Any] = []
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(block(6, self.log) for _ in range(count))
        self.call = call or functools.partial(checkpoint, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.1, self.training)
        for block in self.blocks:
            x = self.call(block, x)
        result: Tensor = self.last(F.dropout(x, 0.1, self.training))
        return result


def logs(after: Any = plain) -> Any:
    def loop(run: Run) -> Any:
        run.state.log = run.model.log
        return after(run)

    return loop


def net(call: Any = None, block: Any = Block) -> Any:
    return lambda: Net(call, block).double()


def with_number(block: Any, x: Tensor) -> Any:
    return checkpoint(block, x, scale=0.5, use_reentrant=False)


def of_a_lambda(block: Any, x: Tensor) -> Any:
    return checkpoint(
        lambda a, b: block(a + b), x, torch.ones(6, dtype=x.dtype), use_reentrant=False
    )


def to_the_end(block: Any, x: Tensor) -> Any:
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def with_other_numbers(block: Any, x: Tensor) -> Any:
    block.rate = 0.0
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def under_autocast(block: Any, x: Tensor) -> Any:
    def region(t: Tensor) -> Any:
        block.log.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return block(t)

    with torch.autocast("cpu", torch.float16):  # which leaves float64 as it is
        return checkpoint(region, x, use_reentrant=False)


def saves_scalars_alone(block: Any, x: Tensor) -> Any:
    """What the region saves has no dimensions and no history, as numbers in a trace."""
    scale = checkpoint(lambda t: t * t.detach().exp(), x.mean(), use_reentrant=False)
    return block(x) * scale


class Normalized(nn.Module):
    """Counts batches, and updates its statistics twice, as in eager."""

    def __init__(self, width: int, log: list[Any]):
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.relu(self.norm(self.layer(x)))
        return result


class Hooked(Block):
    """Has hooks on its results."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = super().forward(x, scale)
        hidden.register_hook(lambda g: self.log.append(g.norm()))
        return hidden * 2


class Counted(Block):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        return super().forward(x, scale)


ONE_PROGRAM: dict[str, Case] = {
    "plain": Case(logs(), net()),
    "clips": Case(logs(clips), net()),
    "number": Case(logs(), net(with_number)),
    "lambda": Case(logs(), net(of_a_lambda)),
    "without early stop": Case(logs(), net(to_the_end)),
    "scalars": Case(logs(), net(saves_scalars_alone)),
    "does not preserve": Case(logs(), net(with_other_numbers)),
    "batch norm": Case(logs(), net(block=Normalized)),
    "hooks": Case(logs(), net(block=Hooked)),
    "counters": Case(logs(), net(block=Counted)),
    "autocast": Case(logs(), net(under_autocast)),
}


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_checkpoints_are_part_of_one_program(name: str) -> None:
    step = assert_equal(ONE_PROGRAM[name])
    assert (step.compilations, step.cuts) == (1, 0)


def with_hooks_of_modules(run: Run) -> Any:
    for block in run.model.blocks:
        block.up.register_full_backward_hook(
            lambda m, below, above: run.model.log.append((below[0].norm(), above[0].norm()))
        )
        block.register_full_backward_hook(
            lambda m, below, above: run.model.log.append((below[0].norm(), above[0].norm()))
        )
    return logs()(run)


def two_passes(run: Run) -> Any:
    run.state.log = run.model.log

    def step(x: Tensor, y: Tensor) -> Any:
        out = run.model(x)
        first, second = F.cross_entropy(out, y), out.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return first, second

    return step


def penalizes(run: Run) -> Any:
    run.state.log = run.model.log

    def step(x: Tensor, y: Tensor) -> Any:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(run.model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def evaluates(run: Run) -> Any:
    run.state.log = run.model.log

    def step(x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            before = run.model(x).mean()
        return plain(run)(x, y), before

    return step


def logs_the_loss(run: Run) -> Any:
    run.state.log = run.model.log
    run.state.losses = []

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.state.losses.append(loss.item())

    return step


@pytest.mark.parametrize("loop", [with_hooks_of_modules, two_passes, penalizes, evaluates])
def test_other_passes_through_checkpoints(loop: Any) -> None:
    step = assert_equal(Case(loop, net()))
    assert (step.compilations, step.cuts) == (1, 0)


def test_a_loss_that_is_logged() -> None:
    step = assert_equal(Case(logs_the_loss, net()))
    assert (step.compilations, step.cuts) == (1, 1)


class Branching(Block):
    """Goes another way now and then, in both runs."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.log.count("step") % 3 == 1:
            x = x.sin() * 2
        return super().forward(x, scale)


class Reading(Block):
    """Reads a value in both runs."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.log.append(f"{x.detach().abs().sum().item():.6f}")
        return super().forward(x, scale)


def notes_steps(run: Run) -> Any:
    run.state.log = run.model.log

    def step(x: Tensor, y: Tensor) -> Any:
        run.model.log.append("step")
        return plain(run)(x, y)

    return step


@pytest.mark.parametrize("block", [Branching, Reading])
def test_checkpoints_that_differ(block: Any) -> None:
    assert_equal(Case(notes_steps, net(block=block), most_eager=4))


def noted(log: list[Any], name: str, function: Any) -> Any:
    def call(x: Tensor) -> Any:
        log.append(name)
        return function(x)

    return call


def again(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def nested(block: Any, x: Tensor) -> Any:
    inner = functools.partial(again, noted(block.log, "inner", block.up))
    return again(lambda t: block.down(torch.tanh(inner(t))), x)


def nested_at_the_end(block: Any, x: Tensor) -> Any:
    """The recomputation of the outer region ends where the inner one begins."""
    inner = noted(block.log, "inner", lambda t: torch.sigmoid(F.dropout(block(t), 0.2)))
    return again(noted(block.log, "outer", lambda t: again(inner, torch.sin(t))), x)


def nested_at_the_beginning(block: Any, x: Tensor) -> Any:
    inner = noted(block.log, "inner", lambda t: torch.sigmoid(F.dropout(block(t), 0.2)))
    return again(noted(block.log, "outer", lambda t: F.dropout(again(inner, t), 0.1).sin()), x)


def nested_without_tensors(block: Any, x: Tensor) -> Any:
    def outer(t: Tensor) -> Any:
        block.log.append("outer")
        return torch.exp(again(lambda: torch.exp(-block.up(t)))) @ block.down.weight.T

    return again(outer, x)


def deeply_nested(block: Any, x: Tensor) -> Any:
    def levels(depth: int, t: Tensor) -> Any:
        block.log.append(depth)
        if not depth:
            return block(t)
        return torch.sigmoid(again(functools.partial(levels, depth - 1), F.dropout(t.sin(), 0.1)))

    return again(functools.partial(levels, 3), x)


def two_within_one(block: Any, x: Tensor) -> Any:
    def outer(t: Tensor, scale: Any) -> Any:
        first = again(noted(block.log, "first", block), t.tanh())
        second = again(lambda a, b: torch.exp(-block(a * b.sin())), first, t * scale)
        return first + second

    return again(outer, x, torch.tensor(0.5, dtype=x.dtype))


def nested_to_the_end(block: Any, x: Tensor) -> Any:
    with set_checkpoint_early_stop(False):
        return nested_at_the_end(block, x)


def reentrant(block: Any, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=True)


def reentrant_within(block: Any, x: Tensor) -> Any:
    return again(noted(block.log, "outer", lambda t: reentrant(block, t.sin())), x)


def within_reentrant(block: Any, x: Tensor) -> Any:
    return checkpoint(
        noted(block.log, "outer", lambda t: again(block, t.sin())), x, use_reentrant=True
    )


def of_a_function(block: Any, x: Tensor) -> Any:
    return again(lambda t: block(Swish.apply(t, 1.0)), x)


class Pair(Function):
    """Saves an argument, nothing and a result; its backward is noted."""

    log: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        result = torch.exp(-x)
        ctx.save_for_backward(x, None, result, y)
        return result * y, result

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        x, nothing, result, y = ctx.saved_tensors
        assert nothing is None
        Pair.log.append((first.norm(), second.norm(), x.detach().sum(), result.detach().sum()))
        return -result * (first * y + second), first * result


def of_several_functions(block: Any, x: Tensor) -> Any:
    Pair.log = block.log

    def region(t: Tensor) -> Any:
        block.log.append("region")
        first, second = Pair.apply(t.sin(), block.norm.weight)
        return Swish.apply(block(first) + second, 0.5)

    return again(region, x)


def a_function_at_the_end(block: Any, x: Tensor) -> Any:
    Pair.log = block.log

    def region(t: Tensor) -> Any:
        block.log.append("region")
        first, _ = Pair.apply(block(t), t * 2)
        block.log.append("behind")
        return first

    return again(region, x)


def functions_nested(block: Any, x: Tensor) -> Any:
    Pair.log = block.log

    def inner(t: Tensor) -> Any:
        block.log.append("inner")
        return sum(Pair.apply(F.dropout(t, 0.2), block.norm.weight))

    def outer(t: Tensor) -> Any:
        block.log.append("outer")
        first, _ = Pair.apply(t.tanh(), again(inner, t.sin()))  # its exponential stays small
        return block(again(inner, first))

    return again(outer, x)


WITHIN = (
    nested, nested_at_the_end, nested_at_the_beginning, nested_without_tensors, deeply_nested,
    two_within_one, nested_to_the_end, reentrant, reentrant_within, within_reentrant,
    of_a_function, of_several_functions, a_function_at_the_end, functions_nested,
)  # fmt: skip


@pytest.mark.parametrize("call", WITHIN)
def test_what_is_within_a_checkpoint_is_part_of_one_program(call: Any) -> None:
    step = assert_equal(Case(logs(), net(call)))
    assert (step.compilations, step.cuts) == (1, 0)
    assert step.eager_steps == 1, step.divergences


def penalizes_quietly(run: Run) -> Any:
    """Without a log: a function's backward is called more often than in eager.

    The history of what a function has saved is that of the second run, whose nodes have a backward
    of their own.
    """
    step = penalizes(run)
    del run.state.log
    return step


@pytest.mark.parametrize("call", [nested, two_within_one, of_several_functions, functions_nested])
@pytest.mark.parametrize("loop", [with_hooks_of_modules, two_passes, penalizes_quietly])
def test_other_passes_through_what_is_within(loop: Any, call: Any) -> None:
    step = assert_equal(Case(loop, net(call), steps=3))  # rounding grows tenfold in each
    assert (step.compilations, step.cuts) == (1, 0)


def maps_within(block: Any, x: Tensor) -> Any:
    """In the inner region, beside functions of the user's."""
    Pair.log = block.log

    def inner(t: Tensor) -> Any:
        block.log.append("inner")
        return sum(Pair.apply(torch.vmap(torch.sin)(t), block.norm.weight))

    def outer(t: Tensor) -> Any:
        first, _ = Pair.apply(t.tanh(), again(inner, t.sin()))  # its exponential stays small
        return block(again(inner, first))

    return again(outer, x)


def maps_behind_nested(block: Any, x: Tensor) -> Any:
    out = functions_nested(block, x)
    torch.vmap(torch.sin)(x.detach())
    return out


def maps(block: Any, x: Tensor) -> Any:
    return checkpoint(lambda t: block(torch.vmap(torch.sin)(t)), x, use_reentrant=False)


def maps_behind(block: Any, x: Tensor) -> Any:
    out = checkpoint(block, x, use_reentrant=False)
    torch.vmap(torch.sin)(x.detach())
    return out


def with_contexts(block: Any, x: Tensor) -> Any:
    contexts = lambda: (contextlib.nullcontext(), contextlib.nullcontext())  # noqa: E731
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("call", [maps, maps_within, maps_behind, maps_behind_nested])
def test_transforms_in_steps_with_checkpoints(call: Any) -> None:
    step = assert_equal(Case(logs(), net(call)))
    assert (step.compilations, step.eager_steps) == (1, 1)


def test_checkpoints_in_eager() -> None:
    step = assert_equal(Case(logs(), net(with_contexts), eager=True))
    assert set(step.refusals.values()) == {"a checkpoint with a custom context_fn"}


def test_sequences_of_checkpoints() -> None:
    class Sequence(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint_sequential(list(self.blocks), 2, self.first(x), use_reentrant=False)
            result: Tensor = self.last(x)
            return result

    step = assert_equal(Case(logs(), lambda: Sequence().double()))
    assert step.compilations == 1


@pytest.mark.parametrize("call", [1, 3])
def test_an_exception_in_a_recomputation_leaves_the_state_as_it_was(call: int) -> None:
    torch.manual_seed(0)
    model: Any = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    is_bad = [False]

    class Failing(Block):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            if is_bad[0] and len(self.log) >= 3:
                raise KeyError("mine")
            return super().forward(x, scale)

    for i in range(3):
        model.blocks[i] = Failing(6, model.log).double()
    step = compile_step(
        plain(Run(model, optimizer)), model=model, optimizer=optimizer, backend="aot_eager",
        python="replay",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(call):
        step(*batches(0, generator))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    is_bad[0] = True
    model.log.clear()
    with pytest.raises(KeyError, match="mine"):
        step(*batches(0, generator))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    is_bad[0] = False
    step(*batches(0, generator))
    assert not torch.equal(model.first.weight, before["first.weight"])
