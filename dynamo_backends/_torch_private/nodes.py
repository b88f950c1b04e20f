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


def edge_of(tensor: Tensor) -> tuple[Any, int]:
    """Returns where a backward pass meets the gradient of a tensor."""
    node = tensor.grad_fn or get_gradient_edge(tensor).node
    return node, tensor.output_nr


def autograd_node_class(name: str) -> type | None:
    """Returns the C++ class of autograd nodes of a name such as "AddmmBackward0"."""
    kind: type | None = getattr(torch._C._functions, name, None)
    return kind


def sequence_number(node: Any) -> int:
    """Later nodes have larger ones, and nodes that accumulate the largest."""
    number: int = node._sequence_nr()
    return number


def input_metadata(node: Any) -> tuple[Any, ...]:
    """Shape, dtype and device of each gradient that a node gets."""
    metadata: tuple[Any, ...] = node._input_metadata
    return metadata


def is_accumulation(node: Any) -> bool:
    """Returns whether a node accumulates the gradient of a leaf."""
    return hasattr(node, "variable") and node.name() == "torch::autograd::AccumulateGrad"


def saves_tensors(node: Any) -> bool:
    """Returns whether a node keeps tensors for the backward pass."""
    kind = type(node)
    saves = _SAVES.get(kind)
    if saves is None:
        saves = _SAVES[kind] = any(name.startswith("_raw_saved_") for name in dir(kind))
    return saves


_SAVES: dict[type, bool] = {}


def call_node(node: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Computes the gradients of a node's inputs; its hooks are not called."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        given = [
            torch.zeros(tuple(m.shape), dtype=m.dtype, device=m.device) if g is None else g
            for g, m in zip(gradients, input_metadata(node), strict=True)
        ]
        results = node.apply(*given)
    else:
        results = node(*gradients)
    return results if isinstance(results, tuple) else (results,)


def bound_arguments(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function's forward with their defaults, as `Function.apply` has them."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor has been written to; no mode is asked."""
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
