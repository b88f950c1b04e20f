"""What activation checkpoints of torch have besides `torch.utils.checkpoint.checkpoint`.

| what | checked |
|---|---|
| `torch.utils.checkpoint._StopRecomputationError`, `_enable_checkpoint_early_stop` | 2.13* |
| `torch.utils.checkpoint._checkpoint_without_reentrant_generator` | 2.13, 2.11 |
| `torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl` | 2.15 |
| `torch.utils.checkpoint._NoopSaveInputs`: saves a tensor besides a region's arguments | 2.11 |
| `torch._C._current_graph_task_id` | 2.13* |
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from dynamo_backends._torch_private.tracing import disable_current_modes

StopRecomputation: type[Exception] = checkpoint._StopRecomputationError

_GENERATOR = "_checkpoint_without_reentrant_generator"

GENERATOR: tuple[Any, str] = (
    checkpoint,
    f"{_GENERATOR}_impl" if hasattr(checkpoint, f"{_GENERATOR}_impl") else _GENERATOR,
)
"""What `checkpoint` calls before and after its function."""

SAVES_ANOTHER = hasattr(checkpoint, "_NoopSaveInputs")
"""Whether a checkpoint within another saves an empty tensor there, before its arguments."""

graph_task: Callable[[], int] = torch._C._current_graph_task_id

NO_TASK = -1
"""What `graph_task` returns outside of backward passes."""


def early_stop_setting(argument: bool) -> bool:
    """Returns whether recomputations end early: as the process says, or else the argument."""
    setting = checkpoint._enable_checkpoint_early_stop
    return argument if setting is None else bool(setting)


def generator_state() -> Tensor:
    """Returns the state of torch's generator, also in a trace."""
    with disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.default_generator.get_state()


def set_generator_state(state: Tensor) -> None:
    """Puts torch's generator back."""
    with disable_current_modes(), torch._C.DisableTorchFunction():
        torch.default_generator.set_state(state)
