"""Trains a model for some steps, compiled and in eager, and compares all that is left behind."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends import _torch_private as private
from dynamo_backends.bench import ModelCase
from dynamo_backends.bench.suites import Inputs, call

STEPS = 10
PRECISION = 1e-9  # in float64, relative to the largest element of each tensor
PRECISION_INSIDE = 1e-5  # of models that compute in float32 whatever their dtype is
COMPUTE_IN_FLOAT32 = frozenset({"t5", "t5_encoder", "llama", "mamba", "rwkv"})  # their norms do
ROUNDING = 1e-14  # in float64, relative to the largest element of all gradients
OTHERS = 3  # eager runs that are rounded otherwise
TOLERANCE = 1e-3  # in float32; that of PyTorch's benchmark runners for training

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@dataclass
class History:
    """What ten steps of training leave behind, by name."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    draws: Tensor

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor."""
        yield from ((f"loss {i}", loss) for i, loss in enumerate(self.losses))
        yield from ((f"gradient of {name}", g) for name, g in self.gradients.items())
        yield from self.state.items()
        yield from self.optimizer.items()
        yield "random numbers afterwards", self.draws


def train(
    model: nn.Module,
    function: Callable[..., Any],
    inputs: Inputs,
    optimizer: str,
    steps: int = STEPS,
) -> History:
    """Trains towards fixed random targets.

    Args:
        model: Whose parameters to train; in train mode.
        function: The model, or what it was compiled to.
        inputs: Of every step.
        optimizer: A key of `OPTIMIZERS`.
        steps: How many.

    Returns:
        The losses, the gradients of the first step, and the state after the last.
    """
    chosen = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(5)
    losses, first = [], {}
    for _ in range(steps):
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
    """Mean squared distance of all outputs to random targets, the same at every call."""
    generator = torch.Generator().manual_seed(17)
    distances = [
        nn.functional.mse_loss(x, torch.randn(x.shape, generator=generator).to(x))
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

    In float64 every tensor must agree to `PRECISION`, or to `PRECISION_INSIDE` where the model
    itself computes in float32; in float32 it must be as accurate as eager's
    by `torch._dynamo.utils.same`, against training in float64; each tensor is scaled to one before.
    Eager is run several times there, with its rounding disturbed (see `_rounded_otherwise`).

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
            ours = train(model, compiled, inputs, optimizer)
            model.load_state_dict(start)
            theirs = train(model, model, inputs, optimizer)
            if double:
                inside = case.name in COMPUTE_IN_FLOAT32
                _agree(theirs, ours, PRECISION_INSIDE if inside else PRECISION)
                continue
            eager = [theirs, *_rounded_otherwise(model, inputs, optimizer, start)]
            twin = copy.deepcopy(model).double()
            twin.load_state_dict(start)
            _as_accurate(eager, ours, train(twin, twin, to_double(inputs), optimizer))
    return reports


def _rounded_otherwise(
    model: nn.Module, inputs: Inputs, optimizer: str, start: dict[str, Any]
) -> Iterator[History]:
    """Eager training from weights that differ in their last bit.

    Rounding decides on which side of a ReLU's kink, or which of two nearly equal maxima, a value
    is, and the gradient jumps there. These runs show by how much eager itself may differ.
    """
    for seed in range(OTHERS):
        generator = torch.Generator().manual_seed(seed)
        model.load_state_dict(start)
        with torch.no_grad():
            for p in model.parameters():
                sign = torch.randint(-1, 2, p.shape, generator=generator)
                p.mul_(1 + sign * torch.finfo(p.dtype).eps)
        yield train(model, model, inputs, optimizer)


def _agree(expected: History, results: History, precision: float) -> None:
    largest = _largest(expected)
    for (name, e), (same_name, r) in zip(expected.items(), results.items(), strict=True):
        assert name == same_name
        assert (e.dtype, e.shape) == (r.dtype, r.shape), name
        if not e.is_floating_point():
            assert torch.equal(e, r), name
            continue
        if not e.numel():
            continue
        # Gradients that are zero but for rounding are as large as the others' rounding.
        allowed = precision * e.abs().max().item() + ROUNDING * largest
        worst = (e - r).abs().max().item()
        assert worst <= allowed, f"{name} differs by {worst:.3e}, more than {allowed:.3e}"


def _largest(history: History) -> float:
    """The largest element of all gradients."""
    return max(g.abs().max().item() for g in history.gradients.values() if g.numel())


def _as_accurate(eager: Sequence[History], results: History, precise: History) -> None:
    runs = [dict(run.items()) for run in eager]
    largest = _largest(precise)
    for (name, r), (same_name, p) in zip(results.items(), precise.items(), strict=True):
        assert name == same_name
        e = runs[0][name]
        assert (e.dtype, e.shape) == (r.dtype, r.shape), name
        if not e.is_floating_point() or not e.numel():
            assert torch.equal(e, r), name
            continue
        # Scaled to one, so that an absolute tolerance is a relative one.
        scale = max(p.abs().max().item(), 1e-3 * largest)
        right = any(
            private.same(run[name] / scale, r / scale, p / scale, tol=TOLERANCE, log_error=_quiet)
            for run in runs
        )
        worst = (e - r).abs().max().item()
        assert right, f"{name} differs from eager by {worst:.3e} of {scale:.3e}"


def _quiet(*_: Any, **__: Any) -> None:
    pass
