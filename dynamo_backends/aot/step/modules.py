"""Modules whose code reads a number out of a tensor do without it while a step is traced."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

Forward = Callable[..., Any]


def _cumulative_batch_norm(module: Any, original: Forward, x: Tensor) -> Tensor:
    """`momentum=None`: averages weigh all batches alike, so their factor is one over a counter."""
    counter, mean, var = module.num_batches_tracked, module.running_mean, module.running_var
    if not (module.training and module.track_running_stats) or counter is None or mean is None:
        result: Tensor = original(x)
        return result
    module._check_input_dim(x)
    counter.add_(1)
    factor = counter.double().reciprocal()
    of_batch = torch.zeros_like(mean), torch.zeros_like(var)
    normal = F.batch_norm(x, *of_batch, module.weight, module.bias, True, 1.0, module.eps)
    with torch.no_grad():
        for average, new in zip((mean, var), of_batch, strict=True):
            average.copy_(new * factor + average * (1 - factor))
    return normal


def _forward_for_graphs(module: nn.Module) -> Forward | None:
    is_batch_norm = isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
    if is_batch_norm and module.momentum is None and "forward" not in vars(module):
        return partial(_cumulative_batch_norm, module, module.forward)
    return None


@contextlib.contextmanager
def modules_for_graphs(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside: modules that read a number out of a tensor do without.

    Args:
        models: Of the step.
    """
    changed: list[nn.Module] = []
    try:
        for model in models:
            for module in model.modules():
                forward = _forward_for_graphs(module)
                if forward is not None:
                    vars(module)["forward"] = forward
                    changed.append(module)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]
