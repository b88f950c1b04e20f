"""Gradient accumulation: the step function runs on one part of the batch after the other.

Everything up to `optimizer.step()` runs for each part, the rest only for the last. Gradients are
averaged over the parts, as they would be for the mean loss of the whole batch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import amp_scaling, storage_id
from dynamo_backends.interface.errors import OptionError, StepCaptureError, did_you_mean


@contextlib.contextmanager
def override_method(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside: `owner.name(...)` calls `replacement(original, ...)`."""
    original = getattr(owner, name)
    had, before = name in vars(owner), vars(owner).get(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    # Learning rate schedulers look for this on the method.
    vars(call).update(vars(getattr(original, "__func__", original)))
    vars(owner)[name] = call
    try:
        yield
    finally:
        if had:
            vars(owner)[name] = before
        else:
            del vars(owner)[name]


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
        self._share_memory = share_memory or (lambda a, b: storage_id(a) == storage_id(b))
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
                f"accumulate={self._parts} does not divide the first dimension of a batch tensor "
                f"of shape {list(tensor.shape)}. Use a batch size that is divisible by accumulate, "
                "or change accumulate."
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
        scaler = amp_scaling.find_calling_scaler(amp_scaling.ASKS_FOR_OVERFLOW)
        if scaler is not None:  # or it would take the next part's gradients for unscaled
            amp_scaling.reset_optimizer_states(scaler)
        raise _EndOfPart

    def _clear(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._part and not self._losses[self._part]:
            return None  # gradients of earlier parts are in use
        return original(*args, **kwargs)


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
            if (
                func is torch.Tensor.mul
                and amp_scaling.find_calling_scaler(amp_scaling.SCALES) is not None
            ):
                self._call.note_scaled(result, args[0])
            return result
        loss, gradient, *rest = (*args, None) if len(args) == 1 else args
        gradient = kwargs.pop("gradient", gradient)
        gradient = torch.ones_like(loss) if gradient is None else gradient
        func(loss, gradient * self._call.share, *rest, **kwargs)
        self._call.after_backward(loss)
        return None


Precision = Literal["float32", "bf16"]

PRECISIONS: tuple[Precision, ...] = ("float32", "bf16")

_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def check_precision_option(precision: Any) -> None:
    """Raises OptionError unless the option `precision` is "float32" or "bf16"."""
    if precision not in PRECISIONS:
        hint = did_you_mean(str(precision), PRECISIONS)
        raise OptionError(f"precision must be 'float32' or 'bf16', not {precision!r}.{hint}")


def in_bfloat16(
    function: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Callable[..., Any]:
    """Wraps a step function: its forward runs under bfloat16 autocast.

    Casts of weights are not kept from one use to the next one: a step may use them, update them and
    use them again.
    """
    kinds = sorted({p.device.type for model in models for p in model.parameters()} or {"cpu"})

    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                entered = torch.autocast(kind, torch.bfloat16, cache_enabled=False)
                stack.enter_context(entered)
            stack.enter_context(_BackwardOutside(kinds))
            for optimizer in optimizers:
                stack.enter_context(override_method(optimizer, "step", _outside(kinds)))
            return function(*args, **kwargs)

    return call


def _outside(kinds: Sequence[str]) -> Callable[..., Any]:
    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _without_autocast(kinds):
            return original(*args, **kwargs)

    return run


@contextlib.contextmanager
def _without_autocast(kinds: Sequence[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _BackwardOutside(TorchFunctionMode):
    """Runs backward passes outside of autocast."""

    def __init__(self, kinds: Sequence[str]):
        super().__init__()
        self._kinds = kinds

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        outside = func in _BACKWARD and torch.is_autocast_enabled(self._kinds[0])
        with _without_autocast(self._kinds) if outside else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))
