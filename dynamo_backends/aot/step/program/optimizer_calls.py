"""Calls of optimizers in a trace: their steps, and what their `zero_grad` does to gradients."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dynamo_backends.aot.step.program.equal_updates import equal_updates
from dynamo_backends.aot.step.program.substitution import Substitution
from dynamo_backends.aot.step.record.interpreter import OptimizerCalls


class TracedOptimizerCalls(OptimizerCalls):
    """Calls of optimizers in a trace.

    Attributes:
        cleared: Ids of the parameters whose gradients were thrown away before any was computed.
        cleared_late: Ids of those that had none when gradients were thrown away later.
        begun: Whether a gradient was computed, or an optimizer's step taken.
    """

    def __init__(self, substitution: Substitution):
        self._substitution = substitution
        self.cleared: set[int] = set()
        self.cleared_late: set[int] = set()
        self.begun = False

    def step(self, optimizer: Any, overflows: Sequence[Tensor]) -> None:
        """See `OptimizerCalls`: the step is computed, and not taken where gradients overflowed."""
        self.begun = True
        substitution = self._substitution
        formula = formula_of(optimizer)
        with (
            substitution.optimizer_step(optimizer),
            _restoring(substitution.all_fakes, overflows),
            equal_updates(optimizer, substitution.fake, substitution.scalars.forget),
        ):
            if formula is None:
                optimizer.step()
            else:
                formula(optimizer)

    def zero_grad(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """See `OptimizerCalls`."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with self._substitution.clearing():
            if (*args, *kwargs.values(), True)[0]:  # set_to_none
                without = {id(p) for p in parameters if p.grad is None}
                (self.cleared_late if self.begun else self.cleared).update(without)
            optimizer.zero_grad(*args, **kwargs)


@contextlib.contextmanager
def _restoring(
    tensors: Callable[[], Iterable[Tensor]], overflows: Sequence[Tensor]
) -> Iterator[None]:
    """Inside: an optimizer steps; what it writes is taken back where gradients overflowed.

    Args:
        tensors: Gives all that it may write to.
        overflows: Not zero where they did (see `GradScaler.step`).
    """
    if not overflows:
        yield
        return
    with torch.no_grad():
        overflow = torch.stack([f.to("cpu") for f in overflows]).sum() != 0
        before = [(t, t._version, t.clone()) for t in tensors()]  # those unused are dropped
    yield
    with torch.no_grad():
        for tensor, version, contents in before:
            if tensor._version != version:
                tensor.copy_(torch.where(overflow.to(tensor.device), contents, tensor))


# Steps that read values out of tensors in torch, written without: operation by operation as in
# torch; where Python decides between two numbers, `torch.where` does.


def formula_of(optimizer: Optimizer) -> Callable[..., Any] | None:
    """What takes the place of an optimizer's `step` while it is captured; None if nothing does."""
    return _FORMULAS.get(type(optimizer))


@Optimizer.profile_hook_step
@torch.no_grad()
def _adafactor(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Shazeer and Stern, 2018 (arXiv:1804.04235), as torch.optim.Adafactor has it."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        eps1, _ = group["eps"]
        for p in group["params"]:
            if p.grad is None:
                continue
            if eps1 is None:  # that of the first parameter holds for all of a group
                eps1 = torch.finfo(p.dtype).eps
            grad = -p.grad if group["maximize"] else p.grad
            _update(p, grad, optimizer.state[p], {**group, "eps1": eps1})
    return loss


def _update(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    lr, weight_decay, d, eps1 = group["lr"], group["weight_decay"], group["d"], group["eps1"]
    lr = lr.squeeze() if isinstance(lr, Tensor) and lr.ndim else lr
    step = state["step"]
    step += 1
    count = step.item()
    rho = _min(lr, 1 / (count**0.5))
    alpha = _max(group["eps"][1], p.norm(2).item() / (p.numel() ** 0.5)) * rho
    if weight_decay != 0:
        p.mul_(1 - lr * weight_decay)
    variance = _variance(grad, state, count ** group["beta2_decay"], eps1)
    update = variance.clamp_(min=eps1 * eps1).rsqrt_()
    update.mul_(grad)
    root_mean_square = update.norm(2).item() / ((update.numel() ** 0.5) * d)
    p.add_(update, alpha=-alpha / _max(1.0, root_mean_square))


def _variance(grad: Tensor, state: dict[str, Any], weight: Any, eps1: Any) -> Tensor:
    """The estimate of the squared gradient, by the product of a row and a column if it has them."""
    if grad.dim() <= 1:
        state["variance"].lerp_(grad * grad, weight)
        estimate: Tensor = state["variance"].clone()
        return estimate
    rows, columns = state["row_var"], state["col_var"]
    for kept, dim in ((rows, -1), (columns, -2)):
        mean = torch.norm(grad, dim=dim, keepdim=True).square_().div_(grad.size(dim))
        kept.lerp_(mean, weight)
    estimate = rows @ columns
    return estimate.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=eps1))


def _min(a: Any, b: Any) -> Any:
    """Python's `min(a, b)` for numbers and what stands for them."""
    return torch.where(b < a, b, a)


def _max(a: Any, b: Any) -> Any:
    """Python's `max(a, b)`."""
    return torch.where(b > a, b, a)


_FORMULAS: dict[type[Optimizer], Callable[..., Any]] = {torch.optim.Adafactor: _adafactor}
