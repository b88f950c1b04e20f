"""Tensors that torch's own hooks compute before each call of a module and keep in its attributes.

`torch.nn.utils.weight_norm`, `spectral_norm` and `prune` make `weight` of other parameters. Eager
leaves there what the last step computed with, and so does a compiled step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


@dataclass(frozen=True)
class Recomputed:
    """An attribute of a module that an output of the graph belongs to."""

    output: int
    module: nn.Module
    name: str

    def set(self, outputs: Sequence[Tensor]) -> None:
        """Leaves the tensor there."""
        vars(self.module)[self.name] = outputs[self.output]


def names_recomputed(module: nn.Module) -> Iterator[str]:
    """The attributes that hooks of torch's own set before each call of a module."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm):
            yield hook.name
        elif isinstance(hook, BasePruningMethod):
            yield hook._tensor_name


def recomputed_by(
    bindings: Sequence[tuple[nn.Module, Mapping[str, Any], Any]], output: Callable[[Tensor], int]
) -> Iterator[Recomputed]:
    """The attributes that a trace has set.

    Args:
        bindings: The modules, each with the attributes it had before the trace.
        output: Makes an output of the graph of a tensor of the trace.
    """
    for module, attributes, _ in bindings:
        for name in names_recomputed(module):
            now = vars(module).get(name)
            if isinstance(now, Tensor) and now is not attributes.get(name):
                yield Recomputed(output(now), module, name)
