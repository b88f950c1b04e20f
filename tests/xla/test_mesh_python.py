"""Steps on a mesh whose Python runs at every call equal those in eager."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynamo_backends import SaveError, StepCaptureError, compile_step
from dynamo_backends._torch_private import accumulate_grad_node
from tests.aot.record.checks import Run, compare
from tests.aot.record.test_training import selects_rows, skips_by_value

Loop = Callable[[Run], Callable[..., Any]]


class Doubled(torch.autograd.Function):
    """Has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Net(nn.Module):
    """A checkpointed block between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = Doubled.apply(self.first(x))
        return self.last(checkpoint(self.block, x, use_reentrant=False))


def together(run: Run) -> Any:
    """A hook, a function with its own backward, a checkpoint, clipping, a schedule, a log."""
    run.state.n, run.state.log, run.state.calls = 0, [], 0
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    averages = [torch.zeros_like(p) for p in run.model.parameters()]
    run.state.averages = averages

    def hook(gradient: Tensor) -> Tensor:
        run.state.calls += 1
        return gradient * 0.5

    def step(x: Tensor, y: Tensor) -> Any:
        run.state.n += 1
        scores = run.model(x)
        scores.register_hook(hook)
        loss = F.cross_entropy(scores, y)
        if run.state.n in {3}:
            loss = loss + scores.square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
        run.optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            for average, p in zip(averages, run.model.parameters(), strict=True):
                average.lerp_(p, 0.1)
        if run.state.n % 2 == 0:
            run.state.log.append((f"{loss.item():.6f}", scheduler.get_last_lr()))
        return {"loss": loss, "norm": norm, "scores": scores, "rows": x.shape[0]}

    return step


def trained(loop: Loop, steps: int, **settings: Any) -> tuple[Any, Any]:
    """What a loop leaves after a few steps, and its step."""
    torch.manual_seed(0)
    model = Net().double()
    run = Run(model, torch.optim.AdamW(model.parameters(), 0.05))
    step = function = loop(run)
    if settings:
        step = compile_step(
            function, model=model, optimizer=run.optimizer, python="replay", **settings
        )
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(steps):
        x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
        results.append(plain(step(x, torch.randint(0, 3, (8,), generator=generator))))
    left = results, model.state_dict(), run.optimizer.state_dict(), vars(run.state)
    return plain(left), step


def plain(value: Any) -> Any:
    """A value with tensors of the host."""
    if isinstance(value, Tensor):
        return torch.tensor(value.detach().tolist(), dtype=value.dtype)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def test_python_runs_at_every_step_from_the_first_one_on() -> None:
    expected, _ = trained(together, 5)
    found, step = trained(together, 5, mesh={"data": 2}, parallel="fsdp")
    compare("left", found, expected)
    assert (step.eager_steps, step.refusals) == (0, {})
    assert step.compilations == 2  # with and without the third step's penalty
    with pytest.raises(SaveError, match="it uses a mesh"):
        step.snapshot()


def scales(run: Run) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Any:
        run.state.n += 1
        loss = F.cross_entropy(run.model(x if run.state.n != 3 else x * torch.inf), y)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        return scaler._scale

    return step


@pytest.mark.long
def test_a_scaler_skips_steps_that_overflow() -> None:
    expected, _ = trained(scales, 5)
    found, step = trained(scales, 5, mesh={"data": 2})
    compare("left", found, expected)
    assert (step.eager_steps, step.cuts, step.refusals) == (0, 0, {})


@pytest.mark.long
def test_a_value_decides_before_the_backward_pass() -> None:
    expected, _ = trained(skips_by_value, 4)
    found, step = trained(skips_by_value, 4, mesh={"data": 2})
    compare("left", found, expected)
    assert (step.eager_steps, step.cuts) == (0, 2)


def retains(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        scores = run.model(x)
        scores.retain_grad()
        node: Any = scores.grad_fn
        node.register_prehook(lambda above: (above[0].tanh(),))
        loss = F.cross_entropy(scores, y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss, scores.grad

    return step


def test_hooks_on_nodes_and_gradients_of_results():
    expected, _ = trained(retains, 3)
    found, step = trained(retains, 3, mesh={"data": 2})
    compare("left", found, expected)
    assert (step.eager_steps, step.cuts, step.refusals) == (0, 0, {})


def hooks_of_all_kinds(run: Run, when: str) -> Any:
    """Hooks on leaves, their nodes and modules; some are removed, and added, after two steps."""
    run.state.n, run.state.order, nodes, handles = 0, [], [], []

    def note(name: str, result: Any = None) -> Any:
        def hook(*given: Any) -> Any:
            run.state.order.append((run.state.n, name))
            return None if result is None else result(*given)

        return hook

    def register() -> None:
        for name, p in run.model.named_parameters():
            node = accumulate_grad_node(p)
            nodes.append(node)
            halves = note(f"{name} prehook", lambda gradients: (gradients[0] * 0.5,))
            handles.append(node.register_prehook(halves))
            handles.append(
                node.register_prehook(
                    note(f"{name} second", lambda gradients: (gradients[0].tanh(),))
                )
            )
            handles.append(node.register_hook(note(f"{name} posthook")))
            handles.append(p.register_hook(note(f"{name} hook", lambda g: g + 0.01)))
            handles.append(p.register_post_accumulate_grad_hook(note(f"{name} accumulated")))
        last = run.model.last
        handles.append(last.register_full_backward_hook(note("module")))
        handles.append(last.register_full_backward_pre_hook(note("before module")))

    if when == "before":
        register()

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        if when == "within" and run.state.n == 1:
            register()
        if run.state.n == 3:
            for handle in handles[::2]:
                handle.remove()
            nodes[0].register_prehook(note("late", lambda gradients: (gradients[0] * 3,)))
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("when", ["before", "within"])
def test_hooks_move_to_the_mesh_with_what_they_are_on(when: str) -> None:
    loop = functools.partial(hooks_of_all_kinds, when=when)
    expected, _ = trained(loop, 4)
    found, step = trained(loop, 4, mesh={"data": 2})
    compare("left", found, expected)
    assert len(found[3]["order"]) > 80
    assert (step.eager_steps, step.cuts, step.refusals) == (0, 0, {})


def maps(run: Run) -> Any:
    """Transforms of functions before the loss."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        rows = torch.vmap(lambda row: row * row.sum())(x)
        slopes = torch.func.grad(lambda x: x.sin().sum())(x)
        loss = F.cross_entropy(run.model(rows + slopes), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def test_transforms_of_functions_are_a_part_of_the_program() -> None:
    expected, _ = trained(maps, 4)
    found, step = trained(maps, 4, mesh={"data": 2})
    compare("left", found, expected)
    assert (step.eager_steps, step.cuts, step.refusals) == (0, 0, {})
    assert (step.launches, step.compilations) == (4, 1)


def test_what_no_program_holds_is_refused_with_its_line() -> None:
    text = r"calls .*, whose result depends on tensor values at .*test_training"
    with pytest.raises(StepCaptureError, match=text):
        trained(selects_rows, 1, mesh={"data": 2})
