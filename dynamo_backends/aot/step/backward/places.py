"""Places of user code in backward passes: hooks on results and on nodes, gradients of results."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dynamo_backends._torch_private import note_registrations
from dynamo_backends.aot.step.backward.hooks import (
    Gradients,
    call_posthooks,
    call_prehooks,
    hook_gradient,
)


class HookPlace:
    """A hook on a result.

    Args:
        tensor: The number of the result.
        hooks: The hook, by its handle; empty once that is removed.
    """

    def __init__(self, tensor: int | None, hooks: dict[int, Any]):
        self.tensor = tensor
        self.hooks = hooks

    def __call__(self, arrived: Gradients) -> Gradients:
        """Calls the hook."""
        return (hook_gradient(self.hooks, arrived[0]),)


class NodeHookPlace:
    """A hook on an autograd node.

    Args:
        hooks: The hook, by its handle; empty once that is removed.
        results: How many results the node has; None: the hook is before the node.
    """

    def __init__(self, hooks: dict[int, Any], results: int | None):
        self.hooks = hooks
        self.results = results

    def __call__(self, arrived: Gradients) -> Gradients:
        """Calls the hook: from what the node has computed, and what it got, to its results."""
        if self.results is None:
            return call_prehooks(self.hooks, arrived)
        return call_posthooks(self.hooks, arrived[: self.results], arrived[self.results :])


class RetainedPlace:
    """Where the gradient of a result becomes its attribute `grad`.

    Args:
        tensor: The number of the result.
        find: Finds the result; None if it is gone.
    """

    def __init__(self, tensor: int, find: Callable[[int], Tensor | None]):
        self.tensor = tensor
        self._find = find

    def __call__(self, arrived: Gradients) -> Gradients:
        """Sets the attribute, or adds to it."""
        tensor, gradient = self._find(self.tensor), arrived[0]
        if tensor is not None and gradient is not None:
            before = tensor.grad
            if before is None:
                tensor.grad = gradient.clone(memory_format=torch.contiguous_format)
            else:
                tensor.grad = before + gradient
        return arrived


def table_of(hook: Any) -> tuple[dict[int, Any], RemovableHandle]:
    """Returns a table with one hook, and its handle."""
    note_registrations()
    hooks: dict[int, Any] = OrderedDict()
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return hooks, handle


def register_on(node: Any, place: NodeHookPlace) -> None:
    """Has autograd's own engine call a hook."""
    if place.results is None:
        node.register_prehook(place)
    else:
        node.register_hook(lambda results, gradients: place((*results, *gradients)))


def on_input(place: HookPlace, i: int) -> Callable[[Gradients], Gradients]:
    """Returns a hook on a result as one before the node that has made it."""

    def hook(gradients: Gradients) -> Gradients:
        (gradient,) = place((gradients[i],))
        return (*gradients[:i], gradient, *gradients[i + 1 :])

    return hook
