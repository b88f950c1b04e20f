"""Backward passes with hooks on leaves: these hooks are called after the pass, as user code.

A gradient of a leaf has no influence on other gradients. So the pass computes the gradients of
hooked leaves without accumulating them; then the hooks run, one leaf after the other in the order
of eager, and their torch calls are followed like all others.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import hooks_on_gradient

_OF_A_PASS = frozenset(("queue_callback", "_current_graph_task_id"))
"""What hooks may call only while autograd's engine runs."""


def is_hooked(leaf: Tensor) -> bool:
    """Whether a leaf has hooks of its own."""
    return any(hooks_on_gradient(leaf))


def needs_engine(leaf: Tensor) -> bool:
    """Whether a leaf's hooks ask for the backward pass that they are part of."""
    for hooks in hooks_on_gradient(leaf):
        for hook in hooks.values():
            code = getattr(getattr(hook, "__func__", hook), "__code__", None)
            if getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>"):
                return True
            if code is not None and not _OF_A_PASS.isdisjoint(code.co_names):
                return True
    return False


def options_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Tensor.backward` or `torch.autograd.backward`, by the latter's names."""
    names = ["tensors", "grad_tensors", "retain_graph", "create_graph", "inputs"]
    if func is torch.autograd.backward:
        names.insert(4, "grad_variables")
    given = dict(zip(names, args, strict=False)) | kwargs
    if "self" in given:
        given["tensors"] = given.pop("self")
    if "gradient" in given:
        given["grad_tensors"] = given.pop("gradient")
    return {name: value for name, value in given.items() if value is not None}


def backward_without_hooks(
    roots: Any, gradients: Any, hooked: Sequence[Tensor], *, retain_graph: bool
) -> tuple[list[Tensor | None], tuple[int, ...]]:
    """Runs a backward pass that passes over some leaves.

    Args:
        roots: Where it begins.
        gradients: Theirs, or None.
        hooked: Leaves whose hooks are not called, and whose gradients are not accumulated.
        retain_graph: Whether another pass may follow.

    Returns:
        The gradients of these leaves, and the leaves in the order in which they were reached.
    """
    before = [leaf.grad for leaf in hooked]
    order: list[int] = []
    with contextlib.ExitStack() as stack:
        for i, leaf in enumerate(hooked):
            stack.enter_context(_hook_alone(leaf, lambda _, i=i: order.append(i)))
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
def _hook_alone(leaf: Tensor, hook: Any) -> Iterator[None]:
    """Inside: a leaf has one hook and no other."""
    tables: list[Any] = [t for t in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if t]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    handle = leaf.register_post_accumulate_grad_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


def call_hooks(leaf: Tensor, gradient: Tensor) -> None:
    """Calls a leaf's hooks around the accumulation of its gradient, as autograd's engine does."""
    on_gradient, _ = hooks_on_gradient(leaf)
    computed = gradient
    for hook in list(on_gradient.values()):
        result = hook(gradient)
        if result is not None:
            _check(result, gradient, hook)
            gradient = result
    _accumulate(leaf, gradient, is_new=gradient is computed and not on_gradient)
    _, accumulated = hooks_on_gradient(leaf)
    for after in list(accumulated.values()):
        if after(leaf) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def _check(result: Any, gradient: Tensor, hook: Any) -> None:
    name = getattr(hook, "__name__", "<unknown>")
    if not isinstance(result, Tensor):
        raise TypeError(f"expected Tensor, but hook '{name}' returned {type(result).__name__}")
    if result.dtype != gradient.dtype or result.device != gradient.device:
        raise RuntimeError(f"hook '{name}' has changed the type of value")
    if result.shape != gradient.shape:
        raise RuntimeError(f"hook '{name}' has changed the size of value")


def _accumulate(leaf: Tensor, gradient: Tensor, is_new: bool) -> None:
    before = leaf.grad
    if before is not None:
        before.add_(gradient)
    else:
        leaf.grad = gradient if is_new else gradient.detach().clone()
