"""Steps of optimizers that read values out of tensors in torch, written without.

What stands here computes what `torch.optim` does, operation by operation; where Python decides
between two numbers, `torch.where` does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


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
