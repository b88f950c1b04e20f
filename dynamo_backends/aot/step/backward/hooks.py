"""Hooks in backward passes: on leaves, on results and on nodes.

Each is a place at which a backward pass stops; its torch calls are followed like all others.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dynamo_backends._torch_private import (
    accumulate_grad_node,
    count_registrations,
    exclude_hook_registrations,
    hooks_of_node,
    hooks_on_gradient,
)

Gradients = tuple[Tensor | None, ...]

Hooks = Mapping[int, Callable[..., Any]]
"""By handle."""

Tables = tuple[Hooks, Hooks]
"""Hooks before and after an autograd node."""


def is_hooked(leaf: Tensor) -> bool:
    """Returns whether a leaf has hooks of its own."""
    return any(hooks_on_gradient(leaf))


class NodeHooks:
    """Hooks on the nodes that accumulate the gradients of leaves.

    To ask a node takes microseconds, and a step has many. So they are asked again where Python code
    has registered hooks since, whatever these are on.

    Args:
        slots: Where tensors that live from step to step are among those that `find` gets.
        others: Where the others are.
    """

    def __init__(self, slots: Sequence[int], others: Sequence[int]):
        self._slots = slots
        self._others = others
        self._count = -1
        self._seen: list[Tensor | None] = []
        self._hooked: list[Tensor] = []
        self._frozen: list[Tensor] = []

    def find(self, tensors: Sequence[Tensor | None]) -> dict[int, Tables]:
        """The tables of hooks before and after such nodes, by the ids of leaves that have some."""
        count, lives = count_registrations(), [tensors[i] for i in self._slots]
        is_same = count == self._count and all(map(operator.is_, lives, self._seen))
        if not is_same or any(t.requires_grad for t in self._frozen):
            leaves = [t for t in lives if t is not None and t.is_leaf]
            self._frozen = [t for t in leaves if not t.requires_grad]
            self._hooked = [t for t in leaves if t.requires_grad and any(_tables(t))]
            self._count, self._seen = count, lives
        others = [t for i in self._others if (t := tensors[i]) is not None and t.is_leaf]
        found = {id(t): _tables(t) for t in (*self._hooked, *others) if t.requires_grad}
        return {key: tables for key, tables in found.items() if any(tables)}


def _tables(leaf: Tensor) -> Tables:
    return hooks_of_node(accumulate_grad_node(leaf))


def options_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Binds the arguments of a backward call to the names of `torch.autograd.backward`."""
    names = ["tensors", "grad_tensors", "retain_graph", "create_graph", "inputs"]
    if func is torch.autograd.backward:
        names.insert(4, "grad_variables")
    elif func is torch.autograd.grad:
        names[1:] = (
            "inputs",
            "grad_tensors",
            "retain_graph",
            "create_graph",
            "only_inputs",
            "allow_unused",
        )
    given = dict(zip(names, args, strict=False)) | kwargs
    for name, others in _OTHER_NAMES.items():
        for other in given.keys() & set(others):
            value = given.pop(other)
            given[name] = given.get(name) if value is None else value
    return {name: value for name, value in given.items() if value is not None}


_OTHER_NAMES = {
    "tensors": ("self", "outputs"), "grad_tensors": ("gradient", "grad_outputs", "grad_variables"),
}  # fmt: skip


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Returns one tensor or several, as several."""
    return (values,) if isinstance(values, Tensor) or values is None else tuple(values)


def are_tensors(given: dict[str, Any]) -> bool:
    """Returns whether a backward call names tensors only, not nodes, as roots and inputs."""
    ends = *as_tuple(given["tensors"]), *as_tuple(given.get("inputs", ()))
    return not given.get("is_grads_batched") and all(isinstance(t, Tensor) for t in ends)


def checked_gradients(
    found: Sequence[Tensor | None], inputs: Sequence[Tensor], given: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Checks for unused inputs as `torch.autograd.grad` does; fills in zeros if asked."""
    materializes = given.get("materialize_grads")
    if not (given.get("allow_unused", materializes)) and any(g is None for g in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    if not materializes:
        return tuple(found)
    return tuple(
        torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)
    )


def call_hooks(
    leaf: Tensor, gradient: Any, accumulates: bool = True, of_node: Tables = ({}, {})
) -> tuple[Tensor, ...]:
    """Calls a leaf's hooks around the accumulation of its gradient, as autograd's engine does.

    Args:
        leaf: The leaf.
        gradient: Its gradient.
        accumulates: Otherwise the gradient itself was asked for.
        of_node: Hooks before and after the node that accumulates.

    Returns:
        What hooks have made of the gradient, if it was asked for.
    """
    on_gradient, _ = hooks_on_gradient(leaf)
    computed = gradient
    gradient = hook_gradient(on_gradient, gradient)
    if not accumulates:
        return (gradient,)
    before, after = of_node
    (gradient,) = given = call_prehooks(before, (gradient,))
    is_new = gradient is computed and not on_gradient and not before and not after
    if gradient is not None:
        _accumulate(leaf, gradient, is_new)
    _, accumulated = hooks_on_gradient(leaf)
    for hook in list(accumulated.values()):
        if hook(leaf) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")
    call_posthooks(after, (), given)
    return ()


def call_prehooks(hooks: Hooks, gradients: Gradients) -> Gradients:
    """Calls hooks before an autograd node; returns the gradients that it gets."""
    for hook in list(hooks.values()):
        gradients = _result_of(hook(gradients), gradients, hook)
    return gradients


def call_posthooks(hooks: Hooks, results: Gradients, gradients: Gradients) -> Gradients:
    """Calls hooks after an autograd node; returns what they make of its results."""
    for hook in list(hooks.values()):
        results = _result_of(hook(results, gradients), results, hook)
    return results


def _result_of(result: Any, before: Gradients, hook: Any) -> Gradients:
    if result is None:
        return before
    result = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(result) != len(before):
        raise RuntimeError(
            f"hook '{getattr(hook, '__name__', '<unknown>')}' has returned an incorrect number of "
            f"values (got {len(result)}, but expected {len(before)})"
        )
    return result


def hook_gradient(hooks: Mapping[int, Any], gradient: Any) -> Any:
    """Calls the hooks of a tensor on its gradient; returns what they make of it."""
    for hook in list(hooks.values()):
        result = hook(gradient)
        if result is not None:
            _check(result, gradient, hook)
            gradient = result
    return gradient


def _check(result: Any, gradient: Tensor | None, hook: Any) -> None:
    name = getattr(hook, "__name__", "<unknown>")
    if gradient is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if not isinstance(result, Tensor):
        raise TypeError(f"expected Tensor, but hook '{name}' returned {type(result).__name__}")
    if result.dtype != gradient.dtype or result.device != gradient.device:
        raise RuntimeError(f"hook '{name}' has changed the type of value")
    if result.shape != gradient.shape:
        raise RuntimeError(f"hook '{name}' has changed the size of value")


def _accumulate(leaf: Tensor, gradient: Tensor, is_new: bool) -> None:
    before = leaf.grad
    if torch.is_grad_enabled():  # the gradient has a history
        leaf.grad = gradient.clone() if before is None else before + gradient
    elif before is not None:
        before.add_(gradient)
    else:
        leaf.grad = gradient if is_new else gradient.detach().clone()


@dataclass(eq=False)
class TensorHookCallback:
    """Calls a user's tensor hook on the gradient that arrives at a result.

    Attributes:
        tensor: The number of the result.
        hooks: The hook, by its handle; empty once that is removed.
    """

    tensor: int | None
    hooks: dict[int, Any]

    def __call__(self, arrived: Gradients) -> Gradients:
        """Calls the user's hook at its place in the pass."""
        return (hook_gradient(self.hooks, arrived[0]),)


@dataclass(eq=False)
class NodeHookCallback:
    """Calls a user's hook that is registered on an autograd node.

    Attributes:
        hooks: The hook, by its handle; empty once that is removed.
        results: How many results the node has; None: the hook is before the node.
    """

    hooks: dict[int, Any]
    results: int | None

    def __call__(self, arrived: Gradients) -> Gradients:
        """Calls the hook: from what the node has computed, and what it got, to its results."""
        if self.results is None:
            return call_prehooks(self.hooks, arrived)
        return call_posthooks(self.hooks, arrived[: self.results], arrived[self.results :])

    def register_on(self, node: Any) -> None:
        """Has autograd's own engine call the hook."""
        if self.results is None:
            node.register_prehook(self)
        else:
            node.register_hook(lambda results, gradients: self((*results, *gradients)))


@dataclass(eq=False)
class RetainGradCallback:
    """Stores the gradient of a result that retains it in its `grad`."""

    tensor: int
    find: Callable[[int], Tensor | None]

    def __call__(self, arrived: Gradients) -> Gradients:
        """Sets the attribute, or adds to it, unless the result is gone."""
        tensor, gradient = self.find(self.tensor), arrived[0]
        if tensor is not None and gradient is not None:
            before = tensor.grad
            if before is None:
                tensor.grad = gradient.clone(memory_format=torch.contiguous_format)
            else:
                tensor.grad = before + gradient
        return arrived


def register(hook: Any, hooks: dict[int, Any]) -> RemovableHandle:
    """Adds a hook to a table; returns its handle."""
    exclude_hook_registrations()
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def as_node_prehook(place: TensorHookCallback, i: int) -> Callable[[Gradients], Gradients]:
    """Turns a tensor hook on output i into a prehook on the node that made it."""

    def hook(gradients: Gradients) -> Gradients:
        (gradient,) = place((gradients[i],))
        return (*gradients[:i], gradient, *gradients[i + 1 :])

    return hook
