"""Random steps by replay whose backward passes run user code: functions, hooks and checkpoints.

A model is drawn as a row of parts, each with user code in its backward pass, which reads numbers of
the loop, branches by them, draws random numbers or reads values; and an update.
`DYNAMO_BACKENDS_LOOPS=1000` runs so many. A note of the error names the seed.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from tests.aot.record.checks import Case, Run, assert_equal, momentum
from tests.rotation import seeds

QUICK = 4
STEPS = 6

Change = Callable[[Run, Tensor], Tensor]
"""What user code makes of a gradient."""


# What user code does with a gradient.


def _logs(run: Run, g: Tensor) -> Tensor:
    run.state.log.append(g.detach().norm())
    return g


def _scales(run: Run, g: Tensor) -> Tensor:
    return g * (1 + run.state.n / 8)


def _clamps(run: Run, g: Tensor) -> Tensor:
    return g.clamp(-0.1, 0.1)


def _branches(run: Run, g: Tensor) -> Tensor:
    return g.sin() if run.state.n % 3 == 2 else g


def _counts(run: Run, g: Tensor) -> Tensor:
    run.state.calls += 1
    return g * 0.9 if run.state.calls % 2 else g * 1.1


def _reads(run: Run, g: Tensor) -> Tensor:
    run.state.log.append(f"{g.detach().norm().item():.5f}")
    return g


def _decides(run: Run, g: Tensor) -> Tensor:
    return g * 0.5 if g.detach().abs().max() > 0.1 else g


def _draws(run: Run, g: Tensor) -> Tensor:
    return g + 0.01 * torch.randn_like(g)


def _uses_a_weight(run: Run, g: Tensor) -> Tensor:
    return g * run.model.first.bias.detach().cos()


CHANGES: list[Change] = [
    _logs, _scales, _clamps, _branches, _counts, _reads, _decides, _draws, _uses_a_weight,
]  # fmt: skip


# The parts of a model.


def _hook(run: Run, layer: nn.Module, change: Change) -> Any:
    def part(x: Tensor) -> Tensor:
        hidden = layer(x)
        hidden.register_hook(lambda g: change(run, g))
        return hidden + x

    return part


def _in_place(run: Run, layer: nn.Module, change: Change) -> Any:
    def part(x: Tensor) -> Tensor:
        hidden = layer(x)
        hidden.register_hook(lambda g: change(run, g))
        hidden.mul_(1.1)
        hidden.register_hook(lambda g: change(run, g))
        return hidden

    return part


def _function(run: Run, layer: nn.Module, change: Change) -> Any:
    class Own(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.save_for_backward(x)
            ctx.scale = scale
            return torch.tanh(x) * scale

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return change(run, gradient * ctx.scale * (1 - torch.tanh(x) ** 2)), None

    return lambda x: Own.apply(layer(x), 1.5) + x


def _two_results(run: Run, layer: nn.Module, change: Change) -> Any:
    class Parts(Function):
        @staticmethod
        def forward(x: Tensor) -> Any:
            return x.view_as(x), x.cos(), x.argmax(1)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_non_differentiable(output[2])
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, first: Tensor, second: Tensor, _: Any) -> Any:
            (x,) = ctx.saved_tensors
            return change(run, first - second * x.sin())

    def part(x: Tensor) -> Tensor:
        first, second, _ = Parts.apply(layer(x))
        return first + 0.5 * second if run.state.n % 2 else first

    return part


def _checkpoint(run: Run, layer: nn.Module, change: Change) -> Any:
    def region(x: Tensor) -> Tensor:
        run.state.log.append(tuple(x.shape))
        hidden = F.dropout(torch.tanh(layer(x)), 0.2)
        hidden.register_hook(lambda g: change(run, g))
        return torch.exp(-hidden) + x

    return lambda x: checkpoint(region, x, use_reentrant=False)


def _reentrant(run: Run, layer: nn.Module, change: Change) -> Any:
    def region(x: Tensor) -> Tensor:
        run.state.log.append(torch.is_grad_enabled())
        return F.dropout(torch.tanh(layer(x)), 0.2) + x

    def part(x: Tensor) -> Any:
        out = checkpoint(region, x, use_reentrant=True)
        out.register_hook(lambda g: change(run, g))
        return out

    return part


def _module(run: Run, layer: nn.Module, change: Change) -> Any:
    layer.register_full_backward_hook(lambda m, below, above: (change(run, below[0]),))
    layer.register_full_backward_pre_hook(lambda m, above: run.state.log.append(above[0].sum()))
    return lambda x: torch.tanh(layer(x))


def _parameter(run: Run, layer: Any, change: Change) -> Any:
    layer.weight.register_hook(lambda g: change(run, g) if g.shape[0] == 6 else g)
    layer.bias.register_post_accumulate_grad_hook(lambda p: run.state.log.append(p.grad.sum()))
    return layer


def _node(run: Run, layer: nn.Module, change: Change) -> Any:
    def part(x: Tensor) -> Tensor:
        hidden = torch.tanh(layer(x))
        node: Any = hidden.grad_fn
        node.register_prehook(lambda above: (change(run, above[0]),))
        below: Any = node.next_functions[0][0]
        below.register_hook(lambda _, above: run.state.log.append(above[0].norm()))
        return hidden * 2

    return part


def _accumulating_node(run: Run, layer: Any, change: Change) -> Any:
    """Whose hooks come and go."""
    node: Any = get_gradient_edge(layer.weight).node
    handles: list[Any] = []

    def part(x: Tensor) -> Any:
        if run.state.n % 4 == 2:
            handles.append(node.register_prehook(lambda above: (change(run, above[0]),)))
            handles.append(
                node.register_hook(lambda _, above: run.state.log.append(above[0].norm()))
            )
        elif run.state.n % 4 == 0 and handles:
            handles.pop().remove()
        return layer(x)

    return part


def _several(run: Run, layer: Any, change: Change) -> Any:
    def part(x: Tensor) -> Tensor:
        first, second = layer(x), torch.sin(x)

        def hook(gradients: Any) -> None:
            run.state.log.append([g is None or change(run, g).norm() for g in gradients])

        handle = register_multi_grad_hook((first, second, layer.bias), hook)
        before, run.between = run.between, lambda i: (before(i), handle.remove())[0]
        return first + second if run.state.n % 3 else first

    return part


def _callback(run: Run, layer: Any, change: Change) -> Any:
    def callback() -> None:
        run.state.log.append(change(run, layer.weight.grad).sum())

    def hook(g: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(callback)

    layer.bias.register_hook(hook)
    return layer


def _retained(run: Run, layer: nn.Module, change: Change) -> Any:
    def part(x: Tensor) -> Tensor:
        hidden = layer(x)
        hidden.retain_grad()
        hidden.register_hook(lambda g: change(run, g))

        def between(i: int) -> None:
            before(i)
            run.state.log.append(hidden.grad.norm())
            run.between = before

        before, run.between = run.between, between
        return torch.tanh(hidden)

    return part


def _checkpoints(run: Run, layer: nn.Module, change: Change) -> Any:
    """One within the other, and a function in each."""
    own = _function(run, layer, change)

    def inner(x: Tensor) -> Tensor:
        run.state.log.append("inner")
        return torch.sigmoid(own(F.dropout(x, 0.1)))

    def outer(x: Tensor) -> Any:
        run.state.log.append("outer")
        hidden = own(x) + checkpoint(inner, torch.sin(x), use_reentrant=False)
        return F.dropout(torch.exp(-hidden.square()), 0.1) + x

    return lambda x: checkpoint(outer, x, use_reentrant=False)


def _plain(run: Run, layer: nn.Module, change: Change) -> Any:
    return lambda x: torch.sigmoid(layer(x))


PARTS = [
    _hook, _in_place, _function, _two_results, _checkpoint, _reentrant, _module, _parameter, _plain,
    _node, _accumulating_node, _several, _callback, _retained, _checkpoints,
]  # fmt: skip


class Layers(nn.Module):
    """The layers of all parts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))


# How it updates.


def _once(run: Run, loss: Tensor, x: Tensor) -> Any:
    loss.backward()


def _twice(run: Run, loss: Tensor, x: Tensor) -> Any:
    loss.backward(retain_graph=True)
    (loss * 0.1).backward()


def _clips(run: Run, loss: Tensor, x: Tensor) -> Any:
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)


def _logs_the_loss(run: Run, loss: Tensor, x: Tensor) -> Any:
    loss.backward()
    run.state.log.append(f"{loss.item():.5f}")


PASSES = [_once, _once, _twice, _clips, _logs_the_loss]


def case_of(seed: int) -> Case:
    """A random loop."""
    rng = random.Random(seed)
    parts = [(rng.choice(PARTS), rng.choice(CHANGES)) for _ in range(rng.randint(1, 4))]
    backward = rng.choice(PASSES)

    def loop(run: Run) -> Any:
        run.state.log, run.state.n, run.state.calls = [], 0, 0
        layers = zip(parts, run.model.layers, strict=True)
        stack = [make(run, layer, change) for (make, change), layer in layers]

        def step(x: Tensor, y: Tensor) -> Tensor:
            run.state.n += 1
            hidden = run.model.first(x)
            for part in stack:
                hidden = part(hidden)
            loss = F.cross_entropy(run.model.last(hidden), y)
            backward(run, loss, x)
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        return step

    return Case(loop, lambda: Layers(len(parts)).double(), momentum, steps=STEPS, most_eager=STEPS)


def check(seed: int, backend: str = "aot_eager") -> int:
    """Runs a loop; returns how many of its steps were compiled."""
    try:
        step = assert_equal(case_of(seed), backend)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    return STEPS - int(step.eager_steps)


def test_a_hook_that_goes_another_way_leaves_the_history_of_tensors() -> None:
    """They become ordinary tensors within a backward pass, where gradients are not enabled."""
    check(60)


def test_results_have_the_gradients_that_they_retain_where_a_hook_goes_another_way() -> None:
    check(2013)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_random_backward_passes_equal_eager(request: pytest.FixtureRequest) -> None:
    count = int(os.environ.get("DYNAMO_BACKENDS_LOOPS", QUICK))
    full = request.config.getoption("--full") or count != QUICK
    chosen = range(max(count, 100)) if full else seeds(count)
    print(f"seeds {chosen}")
    compiled = [check(seed) for seed in chosen]
    assert sum(compiled) >= STEPS * len(compiled) // 6, compiled
