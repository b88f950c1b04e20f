"""A step for Inductor is cut where backward passes begin and end, and computes the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import dynamo_backends
from dynamo_backends.aot.step.program.backends import StepBackend
from dynamo_backends.aot.step.program.programs import CopyingProgram
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.random_draws import is_random
from dynamo_backends.inductor import steps
from dynamo_backends.inductor.decompositions import decompositions
from dynamo_backends.inductor.phases import Stage, cut, separate
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.kernels.convolution_gradients import BY_PRODUCT
from dynamo_backends.kernels.patterns import CONVOLUTION_BACKWARD
from tests.aot.step_checks import assert_equal_to_eager
from tests.training.stepping import OPTIMIZERS

BATCH, CHANNELS, SIZE = 2, 8, 16


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)


def convnet() -> nn.Module:
    """Two convolutions with batch norm and an activation that differs at two places."""
    layers: list[nn.Module] = []
    for given in (3, CHANNELS):
        convolution = nn.Conv2d(given, CHANNELS, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(CHANNELS), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 2))


def graph_of(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    function: Callable[[nn.Module, torch.optim.Optimizer, Tensor], Any],
    batch: Tensor,
    **settings: Any,
) -> Graph:
    """The graph of a step as Inductor gets it, which runs in eager."""
    found: list[Graph] = []

    def keep(graph: Graph) -> StepProgram:
        found.append(graph)
        return CopyingProgram(graph, lambda inputs: graph.module(*inputs))

    row = StepBackend("inductor", decompositions(), keep)
    monkeypatch.setattr(steps, "step_backend", lambda: row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = dynamo_backends.compile_step(
        lambda x: function(model, optimizer, x),
        model=model, optimizer=optimizer, backend="inductor", **settings,
    )  # fmt: skip
    step(batch)
    if not found:  # a first way through a step by replay is recorded
        step(batch)
    return found[0]


def stages_of(graph: Graph) -> list[Stage]:
    return cut(separate(graph).compute)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def silent(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    one_step(model, optimizer, x)


def two_losses(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    one_step(model, optimizer, x)
    return one_step(model, optimizer, x.flip(0))


def one_after_the_other(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    losses = model(x).square().mean(0)
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses.detach()


def no_backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return model(x).square().mean().detach()


def with_hooks(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    hidden = model(x)
    hidden.register_hook(lambda g: g * 2)
    loss = hidden.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def with_checkpoints(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Two passes, whose recomputations belong to them."""
    total = torch.zeros((), dtype=x.dtype)
    for part in x, x.flip(0):
        loss = checkpoint(model, part, use_reentrant=False).square().mean()
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


REPLAY = {"python": "replay"}

CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "one step": (one_step, {}, 2),
    "silent": (silent, {}, 2),
    "two losses": (two_losses, {}, 4),
    "one after the other": (one_after_the_other, {}, 2),
    "no backward": (no_backward, {}, 1),
    "two parts": (one_step, {"accumulate": 2}, 4),
    "replay": (two_losses, REPLAY, 4),
    "hooks": (with_hooks, {}, 2),
    "hooks, replay": (with_hooks, REPLAY, 2),
    "checkpoints": (with_checkpoints, {}, 4),
    "checkpoints, replay": (with_checkpoints, REPLAY, 4),
}
"""Functions, settings, and how many stages there are."""


@pytest.mark.parametrize("case", CASES)
def test_stages_compute_what_the_whole_does(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, settings, count = CASES[case]
    graph = graph_of(monkeypatch, convnet().double(), function, images(), **settings)
    stages = stages_of(graph)
    assert len(stages) == count
    whole = separate(graph).compute
    inputs = values_of(whole)
    expected = whole(*inputs.values())
    for stage in stages:
        made = stage.module(*(inputs[name] for name in stage.reads))
        inputs |= dict(zip(stage.makes, made, strict=True))
    outputs: Any = whole.graph.output_node().args[0]
    returned = [node.name for node in outputs]
    for wanted, name in zip(expected, returned, strict=True):
        torch.testing.assert_close(inputs[name], wanted, rtol=1e-12, atol=1e-12)


def values_of(module: fx.GraphModule) -> dict[str, Tensor]:
    """Some contents for the inputs of a graph; positive, as for variances."""
    torch.manual_seed(2)
    return {
        place.name: torch.rand(place.meta["val"].shape).to(place.meta["val"].dtype)
        for place in module.graph.find_nodes(op="placeholder")
    }


def test_backward_computes_cheap_things_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each layer only the convolution is kept, and what the next one reads."""
    graph = graph_of(monkeypatch, convnet().double(), one_step, images())
    forward, backward = stages_of(graph)
    nodes = {node.name: node for node in forward.module.graph.nodes}
    full = [n for n in forward.makes if nodes[n].meta["val"].numel() == BATCH * CHANNELS * SIZE**2]
    assert sorted(str(nodes[n].target) for n in full) == [
        "aten.clamp_max.default", "aten.convolution.default", "aten.convolution.default",
    ]  # fmt: skip
    targets = [n.target for n in backward.module.graph.nodes]
    assert torch.ops.aten.convolution.default not in targets
    assert targets.count(CONVOLUTION_BACKWARD) == 2


@pytest.mark.long
def test_gradients_of_convolutions_are_computed_channels_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is handed on to the update has the layout of parameters, which is eager's."""
    compiled: list[tuple[fx.GraphModule, list[Any]]] = []
    compile_one = steps.compile_step_with_inductor

    def spy(module: fx.GraphModule, inputs: list[Any], kept: Any) -> Any:
        compiled.append((module, list(inputs)))
        return compile_one(module, inputs, kept)

    monkeypatch.setattr(steps, "compile_step_with_inductor", spy)
    step = assert_equal_to_eager(convnet, OPTIMIZERS["adamw"], [(images(),)] * 3, "inductor")
    assert (step.launches, step.compilations) == (2, 1)
    assert len(compiled) == 3, "forward, backward, and what writes"
    module, inputs = compiled[1]
    shape = (BATCH, CHANNELS, SIZE, SIZE)
    large = [x for x in inputs if x.shape == shape]
    assert len(large) == 3
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in large)
    calls = [n for n in module.graph.nodes if n.target in (CONVOLUTION_BACKWARD, BY_PRODUCT)]
    assert len(calls) == 2
    for call in calls:
        gradient = call.args[0].meta["val"]
        assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert all(x.is_contiguous() for x in compiled[2][1])


class Attention(nn.Module):
    """Scales weights of attention at random where they are small, which depends on data.

    The partitioner leaves the draw in the backward, unread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (h.unflatten(-1, (2, 4)).mT for h in self.heads(x).chunk(3, -1))
        weights = (query @ key.mT).softmax(-1)
        mixed = nn.functional.rrelu(weights - 0.25, training=True) @ value
        return self.out(nn.functional.gelu(mixed.mT.flatten(-2)))


def test_random_numbers_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(2, 4, 8, dtype=torch.float64)
    graph = graph_of(monkeypatch, Attention().double(), one_step, batch)
    counts = [sum(map(is_random, stage.module.graph.nodes)) for stage in stages_of(graph)]
    assert counts == [1, 0]


@pytest.mark.long
def test_draws_of_later_steps_are_eagers() -> None:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)
    assert_equal_to_eager(Attention, OPTIMIZERS["adamw"], [(batch,)] * 3, "inductor")
