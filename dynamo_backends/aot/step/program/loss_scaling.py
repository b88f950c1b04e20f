"""Gradient scaling in a trace: an optimizer's step that overflows is computed, and not taken.

`GradScaler.step` reads whether a gradient is not finite, and steps the optimizer if none is. In
the graph the optimizer steps, and each tensor that it has written to gets its old contents again
where one was not finite.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import scaling


def _check_and_unscale(gradients: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    for gradient in gradients:
        is_finite = torch.isfinite(gradient).all()
        found.copy_(torch.where(is_finite, found, torch.ones_like(found)))
        gradient.mul_(inverse)


def _update_scale(
    scale: Tensor, successes: Tensor, found: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    overflow = found != 0
    more = successes + 1
    is_enough = more == interval
    wide = scale.double()
    grown = (wide * growth).to(scale.dtype)
    new = torch.where(is_enough & torch.isfinite(grown), grown, scale)
    scale.copy_(torch.where(overflow, (wide * backoff).to(scale.dtype), new))
    successes.copy_(torch.where(overflow | is_enough, torch.zeros_like(more), more))
    return scale


class LossScaling:
    """The calls of gradient scalers in one trace.

    Args:
        optimizers: Of the step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers
        self._found: list[Tensor] = []
        self._fused: list[torch.optim.Optimizer] = []

    def __enter__(self) -> "LossScaling":
        """Has scalers unscale gradients, which fused optimizers else do themselves."""
        self._fused = [o for o in self._optimizers if scaling.unscales(o)]
        for optimizer in self._fused:
            scaling.set_unscales(optimizer, False)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Leaves fused optimizers as they were."""
        for optimizer in self._fused:
            scaling.set_unscales(optimizer, True)

    def handle(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Returns the result of a call of a scaler.

        Returns:
            NotImplemented for other calls.
        """
        if func is Tensor.item and scaling.is_called_by(scaling.ASKS_FOR_OVERFLOW):
            self._found.append(args[0])
            return 0.0  # "step!"
        if func is scaling.CHECK_AND_UNSCALE:
            return _check_and_unscale(*args)
        return _update_scale(*args) if func is scaling.UPDATE_SCALE else NotImplemented

    @contextlib.contextmanager
    def around_step(self, tensors: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Inside: an optimizer steps; what it writes is taken back where gradients overflowed.

        Args:
            tensors: Gives all that it may write to.
        """
        found, self._found = self._found, []
        if not found:
            yield
            return
        with torch.no_grad():
            overflow = torch.stack([f.to("cpu") for f in found]).sum() != 0
            before = [(t, t._version, t.clone()) for t in tensors()]  # those unused are dropped
        yield
        with torch.no_grad():
            for tensor, version, contents in before:
                if tensor._version != version:
                    tensor.copy_(torch.where(overflow.to(tensor.device), contents, tensor))
