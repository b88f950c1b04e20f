"""Gradients of whatever a call returned, so that backward graphs are compiled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def differentiate(results: Any) -> None:
    """Computes gradients of the sum of the results; nothing is added to any `.grad`.

    Args:
        results: What a call returned; afterwards they cannot be differentiated again.

    Raises:
        RuntimeError: They could not be differentiated.
    """
    outputs = [t for t in pytree.tree_leaves(results) if _is_differentiable(t)]
    leaves = _leaves(outputs)
    if leaves:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors without a history on which the outputs depend."""
    leaves: dict[int, Tensor] = {}
    open_nodes = [t.grad_fn for t in outputs]
    seen = set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        open_nodes += [following for following, _ in node.next_functions]
    return list(leaves.values())
