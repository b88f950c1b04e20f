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
COMPUTE_IN_FLOAT32 = frozenset({"t5", "t5_encoder", "llama", "mamba", "rwkv"})  # their norms do
ROUNDING = 1e-14  # in float64, relative to the largest element of all gradients
OTHERS = 3  # eager runs that are rounded otherwise
# They round the weights alone otherwise; a compiled graph does so with every operation, and was
# seen to differ by up to 1.8 times as much.
OPERATIONS = 4
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

    @property
    def dtype(self) -> torch.dtype:
        """Of the losses."""
        return self.losses[0].dtype

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
    before_step: Callable[[], None] = lambda: None,
) -> History:
    """Trains towards fixed random targets.

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

    In float64 every tensor must agree to `PRECISION`, or where eager itself does not agree so well
    with eager whose rounding is disturbed (see `_rounded_otherwise`), about as well as that. In
    float32 it must be as accurate as one of eager and of such runs by `torch._dynamo.utils.same`,
    against training in float64; each tensor is scaled to one before.

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
            inside = torch.float32 if case.name in COMPUTE_IN_FLOAT32 else theirs.dtype
            others = _rounded_otherwise(model, inputs, optimizer, start, inside)
            if double:
                _agree(theirs, ours, others)
                continue
            eager = [theirs, *others]
            twin = copy.deepcopy(model).double()
            twin.load_state_dict(start)
            _as_accurate(eager, ours, train(twin, twin, to_double(inputs), optimizer))
    return reports


def _rounded_otherwise(
    model: nn.Module, inputs: Inputs, optimizer: str, start: dict[str, Any], dtype: torch.dtype
) -> Iterator[History]:
    """Eager training whose weights are changed in the last bit of a dtype before each step.

    Rounding decides on which side of a ReLU's kink, or which of two nearly equal maxima, a value
    is, and the gradient jumps there. These runs show by how much eager itself may differ. The dtype
    is that of the model, or float32 if it computes in that inside (see `COMPUTE_IN_FLOAT32`).
    """
    for seed in range(OTHERS):
        generator = torch.Generator().manual_seed(seed)
        model.load_state_dict(start)

        def disturb(generator: torch.Generator = generator) -> None:
            with torch.no_grad():
                for p in model.parameters():
                    sign = torch.randint(-1, 2, p.shape, generator=generator).to(p.dtype)
                    p.mul_(1 + sign * torch.finfo(dtype).eps)

        yield train(model, model, inputs, optimizer, before_step=disturb)


def _agree(expected: History, results: History, others: Iterator[History]) -> None:
    largest = _largest(expected)
    disturbed: list[dict[str, Tensor]] | None = None
    for (name, e), (same_name, r) in zip(expected.items(), results.items(), strict=True):
        assert name == same_name
        assert (e.dtype, e.shape) == (r.dtype, r.shape), name
        if not e.is_floating_point():
            assert torch.equal(e, r), name
            continue
        if not e.numel():
            continue
        # Gradients that are zero but for rounding are as large as the others' rounding.
        allowed = PRECISION * e.abs().max().item() + ROUNDING * largest
        worst = (e - r).abs().max().item()
        if worst > allowed:
            disturbed = disturbed or [dict(run.items()) for run in others]
            own = max((e - run[name]).abs().max().item() for run in disturbed)
            allowed = OPERATIONS * own
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
