"""Trains a model for some steps, compiled and in eager, and compares all that is left behind."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.bench.suites import Inputs, call
from harness import ModelCase
from tests.training import judging

STEPS = 10
COMPUTE_IN_FLOAT32 = frozenset({"t5", "t5_encoder", "llama", "mamba", "rwkv"})  # their norms do

# Ten steps with ten times this rate enlarge a rounding in a MobileNet's weights by 1e9, and a ReLU
# that is crossed by more.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5),
}


@dataclass
class History:
    """What ten steps of training leave behind, by name."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    draws: Tensor

    def run(self) -> dict[str, Tensor]:
        """Every tensor, for `judging`."""
        return {
            **{f"loss {i}": loss for i, loss in enumerate(self.losses)},
            **{f"gradient of {name}": g for name, g in self.gradients.items()},
            **{f"value of {name}": value for name, value in self.state.items()},
            **self.optimizer,
            "draws afterwards": self.draws,
        }


def train(
    model: nn.Module,
    function: Callable[..., Any],
    inputs: Inputs,
    optimizer: str,
    steps: int = STEPS,
    before_step: Callable[[], None] = lambda: None,
) -> History:
    """Trains towards fixed targets.

    Args:
        model: Whose parameters to train; in train mode.
        function: The model, or what it was compiled to.
        inputs: Of every step.
        optimizer: A key of `OPTIMIZERS`.
        steps: How many.
        before_step: Called before each.

    Returns:
        The losses, the gradients of the first step, and the state after the last.
    """
    chosen = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(5)
    losses, first = [], {}
    for _ in range(steps):
        before_step()
        loss = distance_to_targets(call(function, copy.deepcopy(inputs)))
        loss.backward()
        first = first or {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.detach())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return History(losses, first, state, _tensors(chosen, model), torch.rand(1))


def distance_to_targets(outputs: Any) -> Tensor:
    """Mean squared distance of all outputs to numbers below one, the same at every call."""
    distances = [
        nn.functional.mse_loss(x, (torch.arange(x.numel()) % 7 - 3).view(x.shape).to(x) / 4)
        for x in pytree.tree_leaves(outputs)
        if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return torch.stack(distances).sum()


def _tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    names = {p: name for name, p in model.named_parameters()}
    return {
        f"{key} of {names[p]}": value.clone()
        for p, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def to_double(value: Any) -> Any:
    """Inputs with their floating-point tensors in float64."""
    return pytree.tree_map_only(
        Tensor, lambda x: x.double() if x.is_floating_point() else x.clone(), value
    )


def compare(
    case: ModelCase, backend: str, optimizers: Sequence[str], double: bool, **options: Any
) -> list[GraphReport]:
    """Trains one model compiled and in eager, and asserts that nothing differs.

    The rules are those of `judging`, in float64 and in float32.

    Args:
        case: The model.
        backend: Its name.
        optimizers: Keys of `OPTIMIZERS`; the compiled graphs are used with each.
        double: Whether to train in float64.
        options: Of the backend.

    Returns:
        The reports of the compiled graphs.
    """
    model, inputs = case.make().train(), case.inputs()
    if double:
        model, inputs = model.double(), to_double(inputs)
    wide = double and case.name not in COMPUTE_IN_FLOAT32
    inside = torch.float64 if wide else torch.float32
    start = copy.deepcopy(model.state_dict())
    compiled = torch.compile(
        model, backend=dynamo_backends.compiler(backend, **options), fullgraph=True
    )
    with (
        dynamo_backends.record() as reports,
        torch._dynamo.config.patch(allow_rnn="rnn" in case.tags),
    ):
        for optimizer in optimizers:
            model.load_state_dict(start)
            ours = train(model, compiled, inputs, optimizer).run()
            model.load_state_dict(start)
            theirs = train(model, model, inputs, optimizer).run()
            others = _rounded_otherwise(model, inputs, optimizer, start, inside)
            if double:
                judging.assert_agrees(theirs, ours, others)
                continue
            twin = copy.deepcopy(model).double()
            twin.load_state_dict(start)
            precise = train(twin, twin, to_double(inputs), optimizer).run()
            judging.assert_as_accurate(theirs, ours, precise, others)
    return reports


def _rounded_otherwise(
    model: nn.Module, inputs: Inputs, optimizer: str, start: dict[str, Any], dtype: torch.dtype
) -> Iterator[judging.Run]:
    """Eager training whose rounding is disturbed in a dtype (see `judging.round_otherwise`)."""
    for seed in range(judging.OTHERS):
        disturb = functools.partial(
            judging.round_otherwise, model, torch.Generator().manual_seed(seed), dtype
        )
        model.load_state_dict(start)
        yield train(model, model, inputs, optimizer, before_step=disturb).run()
