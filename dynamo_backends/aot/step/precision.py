"""Steps whose forward pass computes in bfloat16, and whose parameters stay in float32.

It is torch's own recipe of mixed precision: the function runs under autocast, and the backward pass
and the optimizers outside of it. The parameters are the master weights: gradients and state have
their dtype, and a product's weight is rounded to bfloat16 where it is used. So nothing is scaled.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dynamo_backends.aot.step.method_overrides import override_method
from dynamo_backends.interface.errors import OptionError, did_you_mean

Precision = Literal["float32", "bf16"]

PRECISIONS: tuple[Precision, ...] = ("float32", "bf16")

_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def check_precision(precision: Any) -> None:
    """Raises `OptionError` for a precision that there is not."""
    if precision not in PRECISIONS:
        hint = did_you_mean(str(precision), PRECISIONS)
        raise OptionError(f"precision must be 'float32' or 'bf16', not {precision!r}.{hint}")


def in_bfloat16(
    function: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Callable[..., Any]:
    """Returns a step function that runs under autocast to bfloat16, but for backward and update.

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
