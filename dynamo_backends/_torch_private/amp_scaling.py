"""torch.amp.GradScaler from inside of its calls.

| what | checked |
|---|---|
| `GradScaler._maybe_opt_step` | 2.13* |
| `GradScaler._per_optimizer_states` | 2.13* |
| `torch._amp_foreach_non_finite_check_and_unscale_`, `torch._amp_update_scale_` | 2.13* |
| `Optimizer._step_supports_amp_scaling` | 2.13* |
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.amp import grad_scaler
from torch.amp.grad_scaler import GradScaler as GradScaler

CHECK_AND_UNSCALE: Callable[..., Any] = torch._amp_foreach_non_finite_check_and_unscale_
"""Divides lists of gradients by the scale and notes whether one is not finite."""

UPDATE_SCALE: Callable[..., Any] = torch._amp_update_scale_
"""Lets the scale grow or shrink."""

ASKS_FOR_OVERFLOW = GradScaler._maybe_opt_step.__code__
"""What asks whether gradients were finite."""

SCALES = GradScaler.scale.__code__
"""What scales a loss."""

TAKES_STEP = "_maybe_opt_step"
"""The method that takes an optimizer's step unless gradients overflowed."""

OVERFLOWS = "found_inf_per_device"
"""Key in what a scaler notes of an optimizer: for each device whether gradients overflowed."""

_PACKAGE = str(Path(__file__).parents[1])


def find_calling_scaler(code: CodeType) -> GradScaler | None:
    """Returns the `GradScaler` whose method made the current torch call; None if none.

    Args:
        code: The method's code object.

    Returns:
        None if something else called it.
    """
    frame = _frame_of(code)
    return None if frame is None else frame.f_locals["self"]


def _frame_of(code: CodeType) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    for _ in range(2):  # it may be a generator in the method
        if frame is not None and frame.f_code is code:
            return frame
        frame = frame.f_back if frame is not None else None
    return None


def step_without_overflow(optimizer: Any, overflows: Sequence[Any]) -> Any:
    """Calls `optimizer.step()` unless an overflow flag is nonzero, as GradScaler does."""
    if not overflows:
        return optimizer.step()
    return _take_step(None, optimizer, {OVERFLOWS: dict(enumerate(overflows))})


_take_step: Any = GradScaler._maybe_opt_step


def unscales_in_step(optimizer: Any) -> bool:
    """Returns whether an optimizer's fused step unscales the gradients itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def set_unscales(optimizer: Any, value: bool) -> None:
    """Sets whether an optimizer's step unscales the gradients itself."""
    optimizer._step_supports_amp_scaling = value


def reset_optimizer_states(scaler: GradScaler) -> None:
    """Resets a scaler's per-optimizer states, as its `update` does."""
    scaler._per_optimizer_states = defaultdict(grad_scaler._refresh_per_optimizer_state)
