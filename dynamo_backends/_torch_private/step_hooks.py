"""Finds hooks and wrappers that act on a training step from outside of it.

| what | checked |
|---|---|
| `register_hook`, `register_prehook` of a node; `RemovableHandle.hooks_dict_ref` | 2.13* |
| `RemovableHandle.next_id`: one more for each hook of the process that Python registers | 2.13* |
| `torch._C._current_graph_task_id`, `_will_engine_execute_node` | 2.13* |
| `torch.autograd.Variable._execution_engine` | 2.13* |
| `torch._C._autograd._top_saved_tensors_default_hooks` | 2.13* |
| `torch.optim.optimizer._global_optimizer_*_hooks` | 2.13* |
| `DistributedDataParallel._active_ddp_module`, `._run_ddp_forward` | 2.13* |
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

Hooks = Mapping[int, Callable[..., Any]]


def accumulate_grad_node(leaf: Tensor) -> Any:
    """Returns a leaf's `AccumulateGrad` node, which lives while somebody holds it."""
    return get_gradient_edge(leaf).node


def hooks_of_node(node: Any) -> tuple[Hooks, Hooks]:
    """Returns the live tables of an autograd node's pre-hooks and post-hooks, by handle.

    Hooks in C++ are not among them: nothing tells of those.
    """
    exclude_hook_registrations(2)
    return _table(node.register_prehook), _table(node.register_hook)


@contextlib.contextmanager
def keep_node_hooks(leaf: Tensor) -> Iterator[None]:
    """Keeps a leaf's autograd node hooks across `swap_tensors` (context manager).

    The new node calls the hooks of the old one, also those that are removed or added later. The old
    node holds the new one, since a node without a holder loses its hooks.
    """
    uses: int = leaf._use_count()  # type: ignore[attr-defined]
    if not (leaf.is_leaf and leaf.requires_grad and uses > 1):
        yield  # nobody holds a node
        return
    node = accumulate_grad_node(leaf)
    before, after = hooks_of_node(node)
    were = set(before)
    yield
    if not were and not after:
        return
    own = before.keys() - were  # that of `swap_tensors`, which raises if the old node runs

    def call_prehooks(gradients: Any) -> Any:
        for hook in [hook for key, hook in before.items() if key not in own]:
            result = hook(gradients)
            gradients = gradients if result is None else result
        return gradients

    def call_hooks(results: Any, gradients: Any) -> Any:
        for hook in list(after.values()):
            result = hook(results, gradients)
            results = results if result is None else result
        return results

    new = node.metadata["moved to"] = accumulate_grad_node(leaf)
    if were:
        new.register_prehook(call_prehooks)
    if after:
        new.register_hook(call_hooks)


class _Own:
    registrations = 0


def count_registrations() -> int:
    """Returns how many hooks Python code has registered so far; this package's excluded."""
    return RemovableHandle.next_id - _Own.registrations


def exclude_hook_registrations(count: int = 1) -> None:
    """Excludes the next `count` hook registrations from `count_registrations`."""
    _Own.registrations += count


ENGINE: tuple[tuple[Any, str], ...] = (
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_will_engine_execute_node"),
    (torch.autograd.Variable, "_execution_engine"),
)
"""What tells a hook of the backward pass that calls it."""


def _table(register: Callable[[Callable[..., None]], Any]) -> Hooks:
    handle = register(lambda *_: None)
    try:
        table: Hooks = handle.hooks_dict_ref()
        return table
    finally:
        handle.remove()


top_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
"""As `saved_tensors_hooks`, without a call in Python; takes whether it is asked in a trace, too."""


def saved_tensors_hooks() -> Any:
    """Returns the innermost pack and unpack hooks for saved tensors in force, or None."""
    return top_saved_tensors_hooks(False)


def global_optimizer_hooks() -> list[Hooks]:
    """Returns the tables of step hooks registered for all optimizers, by handle."""
    optimizers = sys.modules[torch.optim.Optimizer.__module__]
    return [getattr(optimizers, f"_global_optimizer_{kind}_hooks") for kind in ("pre", "post")]


def is_in_ddp_forward() -> bool:
    """Returns whether this thread runs the forward of a DistributedDataParallel."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    if getattr(wrapper, "_active_ddp_module", None) is None:
        return False
    code = wrapper._run_ddp_forward.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
