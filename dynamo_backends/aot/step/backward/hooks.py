"""Hooks in backward passes: on leaves, on results and on nodes.

A gradient of a leaf has no influence on other gradients. So if leaves alone have hooks, the pass
computes gradients without accumulating them. Then they are accumulated and the hooks run, one leaf
after the other in the order of eager; their torch calls are followed like all others.
"""

import contextlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dynamo_backends._torch_private import (
    accumulation,
    count_registrations,
    disable_current_modes,
    hooks_of_node,
    hooks_on_gradient,
    note_registrations,
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
    return hooks_of_node(accumulation(leaf))


def options_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a backward pass, by the names of `torch.autograd.backward`."""
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
    """Returns whether a pass begins and ends at tensors: not at nodes."""
    ends = *as_tuple(given["tensors"]), *as_tuple(given.get("inputs", ()))
    return not given.get("is_grads_batched") and all(isinstance(t, Tensor) for t in ends)


def checked_gradients(
    found: Sequence[Tensor | None], inputs: Sequence[Tensor], given: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Returns what `torch.autograd.grad` returns, of the gradients that a pass has found."""
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


def backward_without_hooks(
    roots: Any, gradients: Any, hooked: Sequence[Tensor], *, retain_graph: bool
) -> tuple[list[Tensor | None], tuple[int, ...]]:
    """Runs a backward pass that passes over some leaves.

    Args:
        roots: Where it begins.
        gradients: Theirs, or None.
        hooked: Leaves whose hooks, if there are any, are not called, and whose gradients are not
            accumulated.
        retain_graph: Whether another pass may follow.

    Returns:
        The gradients of these leaves, and the leaves in the order in which they were reached.
    """
    before = [leaf.grad for leaf in hooked]
    order: list[int] = []
    with contextlib.ExitStack() as stack:
        for i, leaf in enumerate(hooked):
            stack.enter_context(_with_one_hook(leaf, lambda _, i=i: order.append(i)))
        try:
            for leaf in hooked:
                leaf.grad = None
            torch.autograd.backward(roots, gradients, retain_graph=retain_graph)
            computed = [leaf.grad for leaf in hooked]
        finally:
            for leaf, gradient in zip(hooked, before, strict=True):
                leaf.grad = gradient
    return computed, tuple(order)


@contextlib.contextmanager
def _with_one_hook(leaf: Tensor, hook: Any) -> Iterator[None]:
    """Inside: a leaf has one hook and no other."""
    with disable_current_modes():
        of_node = _tables(leaf)
    of_leaf = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    tables: list[Any] = [table for table in (*of_leaf, *of_node) if table]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    note_registrations()
    handle = leaf.register_post_accumulate_grad_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


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
