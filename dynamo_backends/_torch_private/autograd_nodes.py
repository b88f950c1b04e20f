"""Autograd nodes, one at a time, and activation checkpoints of torch's own.

| what | checked |
|---|---|
| a node is called with gradients; `_sequence_nr`, `_input_metadata`, `_raw_saved_*` | 2.13 |
| `torch._C._functions` has the classes of nodes by their names | 2.13 |
| `torch.autograd._make_grads`, `torch._C.DisableTorchFunction`, `Tensor._version` | 2.13 |
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import checkpoint

from dynamo_backends._torch_private.tracing import disable_current_modes

make_gradients: Any = torch.autograd._make_grads


def gradient_edge(tensor: Tensor) -> tuple[Any, int]:
    """Returns a tensor's gradient edge: its autograd node and output number."""
    node = tensor.grad_fn or get_gradient_edge(tensor).node
    return node, tensor.output_nr


def autograd_node_class(name: str) -> type | None:
    """Returns an autograd node's C++ class by name, as "AddmmBackward0"; None if none."""
    kind: type | None = getattr(torch._C._functions, name, None)
    return kind


def sequence_number(node: Any) -> int:
    """Returns a node's sequence number: larger for later nodes, largest for leaves."""
    number: int = node._sequence_nr()
    return number


def input_metadata(node: Any) -> tuple[Any, ...]:
    """Returns shape, dtype and device of each gradient that a node receives."""
    metadata: tuple[Any, ...] = node._input_metadata
    return metadata


def is_accumulation(node: Any) -> bool:
    """Returns whether a node is `AccumulateGrad`, which adds to a leaf's gradient."""
    return hasattr(node, "variable") and node.name() == "torch::autograd::AccumulateGrad"


def saves_tensors(node: Any) -> bool:
    """Returns whether nodes of this class save tensors for the backward pass."""
    kind = type(node)
    saves = _SAVES.get(kind)
    if saves is None:
        saves = _SAVES[kind] = any(name.startswith("_raw_saved_") for name in dir(kind))
    return saves


_SAVES: dict[type, bool] = {}


def run_autograd_node(node: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Runs a node on gradients, without its hooks; returns one gradient per input."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        given = [
            torch.zeros(tuple(m.shape), dtype=m.dtype, device=m.device) if g is None else g
            for g, m in zip(gradients, input_metadata(node), strict=True)
        ]
        results = node.apply(*given)
    else:
        results = node(*gradients)
    return results if isinstance(results, tuple) else (results,)


def bind_arguments(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Binds arguments to a custom function's `forward`, with defaults filled in."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def version_of(tensor: Tensor) -> int:
    """Returns a tensor's version counter, without calling function modes."""
    with torch._C.DisableTorchFunction():
        version: int = tensor._version
        return version


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
    """Returns whether checkpoints stop recomputing early: global setting, or argument."""
    setting = checkpoint._enable_checkpoint_early_stop
    return argument if setting is None else bool(setting)


def generator_state() -> Tensor:
    """Returns the default CPU generator's state, also while tracing."""
    with disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.default_generator.get_state()


def set_generator_state(state: Tensor) -> None:
    """Sets the default CPU generator's state, also while tracing."""
    with disable_current_modes(), torch._C.DisableTorchFunction():
        torch.default_generator.set_state(state)
