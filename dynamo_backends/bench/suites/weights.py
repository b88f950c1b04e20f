"""Random weights under which a mistake in any operator shows in the output.

Freshly initialised networks are poor tests: biases are 0 and norm weights 1 (an operator that
ignores them is right), batch-norm statistics are those of no data (folding is the identity),
layer scales are 1e-6 (whole blocks vanish), and activations of deep networks shrink below any
tolerance. `randomize_weights` mends all four.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@torch.no_grad()
def randomize_weights(model: nn.Module, run: Callable[[], Any]) -> None:
    """Fills a model with random weights that keep activations near unit size.

    Args:
        model: Changed in place; draws from torch's global generator.
        run: Runs the model once; used to measure statistics for batch norms.
    """
    for module in model.modules():
        weight, fan_in = _matrix(module)
        if weight is not None:
            gain = math.sqrt(2.0) if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)) else 1.0
            nn.init.normal_(weight, std=gain / math.sqrt(fan_in))
    for parameter in model.parameters():
        _vary_constant(parameter)
    norms = [m for m in model.modules() if isinstance(m, _BATCH_NORMS) and m.track_running_stats]
    if norms:
        _measure_statistics(norms, run)


def _matrix(module: Any) -> tuple[Tensor | None, int]:
    """Returns the weight of a linear operation and the number of products per result."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        return weight, module.in_features
    if isinstance(module, _CONVOLUTIONS):
        return weight, math.prod(weight.shape[1:])
    if isinstance(module, _TRANSPOSED):
        taps = math.prod(weight.shape[2:]) / math.prod(module.stride)
        return weight, max(1, round(module.in_channels // module.groups * taps))
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor):  # transformers' GPT-2
        return weight, weight.shape[0]
    return None, 0


def _vary_constant(parameter: nn.Parameter) -> None:
    """Makes a parameter whose elements are all equal random around its value."""
    if parameter.numel() < 2 or not parameter.is_floating_point():
        return
    value = parameter.flatten()[0].item()
    if not bool((parameter == value).all()):
        return
    if value == 0:
        nn.init.normal_(parameter, std=0.1)
    else:
        nn.init.uniform_(parameter, 0.5 * value, 1.5 * value)


def _measure_statistics(norms: Sequence[Any], run: Callable[[], Any]) -> None:
    """Gives batch norms the statistics of one batch, slightly off so that they do not cancel."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    run()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
        mean, variance = norm.running_mean, norm.running_var
        mean += 0.1 * torch.randn_like(mean) * variance.sqrt()
        variance *= torch.empty_like(variance).uniform_(0.7, 1.4)
        variance += 0.01
