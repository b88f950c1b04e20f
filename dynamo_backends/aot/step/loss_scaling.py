"""torch.amp.GradScaler in a step: a step that overflows is computed, and its results are not taken.

In eager the scaler reads whether a gradient is not finite, and steps the optimizer if none is. In
the graph the optimizer steps, and each tensor that it has written to gets its old contents again
where one was not finite.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import FakeTensor, disable_current_modes, scaling
from dynamo_backends.interface.errors import StepCaptureError


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
    """What the scalers of one trace do.

    Args:
        optimizers: Of the step.

    Attributes:
        scalers: Those that were met.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.scalers: list[Any] = []
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
        """Leaves nothing of the trace in the scalers.

        Raises:
            StepCaptureError: There was something, for a later call to find.
        """
        for optimizer in self._fused:
            scaling.set_unscales(optimizer, True)
        left = [s for s in self.scalers if _holds_fakes(s)]
        for scaler in left:
            scaling.forget_unfinished(scaler)
        if left and error is None:
            raise StepCaptureError(
                "the step unscales gradients or steps an optimizer by a GradScaler, and its "
                "update() is called elsewhere. Call scaler.update() at the end of the function, or "
                'pass fallback="split".'
            )

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call that a scaler makes.

        Returns:
            NotImplemented for other calls.
        """
        if func is Tensor.item:
            if not scaling.is_called_by(scaling.ASKS_FOR_OVERFLOW):
                return NotImplemented
            self._found.append(args[0])
            return 0.0  # "step!"
        if func is torch.full:
            return self._first_scale(args, kwargs)
        if func is scaling.CHECK_AND_UNSCALE:
            self._meet(scaling.scaler_that(scaling.UNSCALES))
            return _check_and_unscale(*args)
        return _update_scale(*args) if func is scaling.UPDATE_SCALE else NotImplemented

    def _first_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The scale is made at a scaler's first call, and lives on."""
        if scaling.scaler_that(scaling.MAKES_SCALE) is None:
            return NotImplemented
        with disable_current_modes(), torch._C.DisableTorchFunction():
            return torch.full(*args, **kwargs)

    def _meet(self, scaler: Any) -> None:
        if scaler is not None and not any(scaler is s for s in self.scalers):
            self.scalers.append(scaler)

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


def _holds_fakes(scaler: Any) -> bool:
    return any(isinstance(x, FakeTensor) for x in scaling.unfinished(scaler))


class ScalerGuard:
    """Whether scalers have the settings they had."""

    def __init__(self, scalers: Sequence[Any]):
        self._scalers = scalers
        self._settings = [scaling.settings_of(s) for s in scalers]

    def holds(self) -> bool:
        """Whether they do."""
        return (
            not self._scalers or [scaling.settings_of(s) for s in self._scalers] == self._settings
        )
