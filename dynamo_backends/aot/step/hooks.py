"""Hooks that a user has registered: in a trace as in eager, and seen when there are others."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends._torch_private import (
    accumulation,
    disable_current_modes,
    hooks_of_node,
    hooks_on_gradient,
    tables_of_global_hooks,
    tables_of_hooks,
)
from dynamo_backends.runtime import freezing


def has_global_hooks() -> bool:
    """Returns whether the user has hooks of all modules or optimizers of the process.

    Frozen weights have one of this package (`runtime.freezing`): a program of a step counts the
    versions of what it updates, which tells them as well.
    """
    if not any(_GLOBAL_HOOKS):
        return False
    hooks = chain.from_iterable(map(dict.values, _GLOBAL_HOOKS))
    return any(getattr(hook, "__module__", None) != freezing.__name__ for hook in hooks)


_GLOBAL_HOOKS: Any = tables_of_global_hooks()


def carry_over(real: Tensor, fake: Tensor) -> Any:
    """Registers a leaf's hooks on the tensor that stands in for it.

    Hooks that run after a gradient has been accumulated are given the leaf itself, which they may
    look up in tables of their own.

    Returns:
        The node that accumulates the stand-in's gradient if it has hooks, which live as long as it.
    """
    on_gradient, accumulated = hooks_on_gradient(real)
    for hook in on_gradient.values():
        fake.register_hook(hook)
    for hook in accumulated.values():
        fake.register_post_accumulate_grad_hook(partial(_call_with, real, hook))
    with disable_current_modes():
        before, after = hooks_of_node(accumulation(real))
    if not before and not after:
        return None
    node = accumulation(fake)
    for hook in before.values():
        node.register_prehook(hook)
    for hook in after.values():
        node.register_hook(hook)
    return node


def _call_with(real: Tensor, hook: Callable[[Tensor], None], _: Tensor) -> None:
    hook(real)


class HookGuard:
    """Whether the hooks are those of when this was made.

    Args:
        models: Whose modules may have hooks.
        optimizers: Which may have hooks.
        parameters: The same.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[Tensor],
    ):
        owners: list[nn.Module | torch.optim.Optimizer]
        owners = [*(module for model in models for module in model.modules()), *optimizers]
        self._tables = [table for owner in owners for table in tables_of_hooks(owner)]
        self._tables += tables_of_global_hooks()
        # Nodes without hooks are not held: their lifetime would show in eager.
        leaves = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._nodes = [node for node in map(accumulation, leaves) if any(hooks_of_node(node))]
        self._tables += [table for node in self._nodes for table in hooks_of_node(node)]
        self._handles = self._handles_of(parameters)

    def _handles_of(self, parameters: Sequence[Tensor]) -> list[Any]:
        on_tensors = [tuple(map(tuple, hooks_on_gradient(p))) for p in parameters]
        return [*map(tuple, self._tables), *on_tensors]

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether no hook was added or removed."""
        return self._handles_of(parameters) == self._handles
