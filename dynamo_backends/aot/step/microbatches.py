"""Gradient accumulation: the step function runs on one part of the batch after the other.

Everything up to `optimizer.step()` runs for each part, the rest only for the last. Gradients are
averaged over the parts, as they would be for the mean loss of the whole batch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import scaling, storage_id
from dynamo_backends.aot.step.method_overrides import override_method
from dynamo_backends.interface.errors import StepCaptureError


class _EndOfPart(BaseException):
    """`optimizer.step()` was reached in a part that is not the last."""


class StepCall:
    """One call of a step function, and what it does to the gradients."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        models: Sequence[nn.Module],
        parts: int,
        share_memory: Callable[[Tensor, Tensor], bool] | None = None,
    ):
        self._share_memory = share_memory or _share_storage
        self._optimizers = optimizers
        self._models = models
        self._parts = parts
        self._part = 0
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._losses: list[list[Tensor]] = [[] for _ in range(parts)]
        self._scaled: list[tuple[Any, Tensor]] = []

    def __call__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the function for each part.

        Args:
            function: The user's.
            args: Its arguments; tensors of at least one dimension are split along the first.
            kwargs: Likewise.

        Returns:
            What it returns for the last part; a loss that it returns is the mean over the parts.
        """
        with self._patched(), _Backward(self):
            result = None
            for part in range(self._parts):
                self._part = part
                given = pytree.tree_map_only(Tensor, self._slice, (tuple(args), kwargs))
                try:
                    result = function(*given[0], **given[1])
                except _EndOfPart:
                    self._restore()
            return pytree.tree_map_only(Tensor, self._mean, result)

    @property
    def _is_last(self) -> bool:
        return self._part == self._parts - 1

    def _slice(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        size, rest = divmod(tensor.shape[0], self._parts)
        if rest or not size:
            raise StepCaptureError(
                f"accumulate={self._parts} needs batches that it divides, got a tensor of shape "
                f"{list(tensor.shape)}. Use another batch size, or another value of accumulate."
            )
        return tensor[self._part * size : (self._part + 1) * size]

    def after_backward(self, loss: Tensor) -> None:
        """Remembers the gradients before anybody clips them."""
        plain = next((x for scaled, x in self._scaled if scaled is loss), loss)
        self._losses[self._part].append(plain)
        self._scaled.clear()
        if not self._is_last:
            parameters = [p for o in self._optimizers for g in o.param_groups for p in g["params"]]
            parameters += [p for m in self._models for p in m.parameters()]
            self._kept = [(p, p.grad.clone()) for p in parameters if p.grad is not None]

    def note_scaled(self, scaled: Any, loss: Tensor) -> None:
        """Remembers what a `GradScaler` has scaled."""
        self._scaled.append((scaled, loss))

    @property
    def share(self) -> float:
        """The weight of one part's loss."""
        return 1.0 / self._parts

    def _restore(self) -> None:
        for p, gradient in self._kept:
            p.grad = gradient

    def _mean(self, result: Tensor) -> Tensor:
        losses = enumerate(self._losses[-1])
        number = next((i for i, x in losses if self._is_same(x, result)), None)
        if number is None:
            return result
        same = [losses[number].detach() for losses in self._losses if number < len(losses)]
        return torch.stack(same).mean(0)

    def _is_same(self, loss: Tensor, result: Tensor) -> bool:
        return loss is result or (loss.shape == result.shape and self._share_memory(loss, result))

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(override_method(optimizer, "step", self._step))
            for owner in (*self._optimizers, *self._models):
                stack.enter_context(override_method(owner, "zero_grad", self._clear))
            yield

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_last:
            return original(*args, **kwargs)
        scaler = scaling.scaler_that(scaling.ASKS_FOR_OVERFLOW)
        if scaler is not None:  # or it would take the next part's gradients for unscaled
            scaling.forget_unfinished(scaler)
        raise _EndOfPart

    def _clear(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._part and not self._losses[self._part]:
            return None  # gradients of earlier parts are in use
        return original(*args, **kwargs)


def _share_storage(loss: Tensor, result: Tensor) -> bool:
    return storage_id(loss) == storage_id(result)


class _Backward(TorchFunctionMode):
    """Weighs the gradients of each part."""

    def __init__(self, call: StepCall):
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.Tensor.backward:
            result = func(*args, **kwargs)
            if func is torch.Tensor.mul and scaling.scaler_that(scaling.SCALES) is not None:
                self._call.note_scaled(result, args[0])
            return result
        loss, gradient, *rest = (*args, None) if len(args) == 1 else args
        gradient = kwargs.pop("gradient", gradient)
        gradient = torch.ones_like(loss) if gradient is None else gradient
        func(loss, gradient * self._call.share, *rest, **kwargs)
        self._call.after_backward(loss)
        return None
