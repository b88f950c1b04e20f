"""Backward passes with hooks on leaves: these hooks are called after the pass, as user code.

A gradient of a leaf has no influence on other gradients. So the pass computes the gradients of
hooked leaves without accumulating them; then the hooks run, one leaf after the other in the order
of eager, and their torch calls are followed like all others.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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
    return any(asks_engine(h) for hooks in hooks_on_gradient(leaf) for h in hooks.values())


def asks_engine(hook: Any) -> bool:
    """Whether user code asks autograd's engine for the pass that it is part of."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>"):
        return True
    return code is not None and not _OF_A_PASS.isdisjoint(code.co_names)


def options_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a backward pass, by the names of `torch.autograd.backward`."""
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
    """One tensor or several, as several."""
    return (values,) if isinstance(values, Tensor) or values is None else tuple(values)


def are_tensors(given: dict[str, Any]) -> bool:
    """Whether a pass begins and ends at tensors: not at nodes, and not at those of a dictionary."""
    roots, inputs = given["tensors"], given.get("inputs", ())
    is_plain = not isinstance(inputs, dict) and not given.get("is_grads_batched")
    return is_plain and all(isinstance(t, Tensor) for t in (*as_tuple(roots), *as_tuple(inputs)))


def checked_gradients(
    found: Sequence[Tensor | None], inputs: Sequence[Tensor], given: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """What `torch.autograd.grad` returns, of the gradients that a pass has found."""
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
        hooked: Leaves whose hooks are not called, and whose gradients are not accumulated.
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


def call_hooks(leaf: Tensor, gradient: Any, accumulates: bool = True) -> tuple[Tensor, ...]:
    """Calls a leaf's hooks around the accumulation of its gradient, as autograd's engine does.

    Args:
        leaf: The leaf.
        gradient: Its gradient.
        accumulates: Otherwise the gradient itself was asked for.

    Returns:
        What hooks have made of the gradient, if it was asked for.
    """
    on_gradient, _ = hooks_on_gradient(leaf)
    computed = gradient
    gradient = hook_gradient(on_gradient, gradient)
    if not accumulates:
        return (gradient,)
    _accumulate(leaf, gradient, is_new=gradient is computed and not on_gradient)
    _, accumulated = hooks_on_gradient(leaf)
    for after in list(accumulated.values()):
        if after(leaf) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")
    return ()


def hook_gradient(hooks: Mapping[int, Any], gradient: Any) -> Any:
    """Calls the hooks of a tensor on its gradient; returns what they make of it."""
    for hook in list(hooks.values()):
        result = hook(gradient)
        if result is not None:
            _check(result, gradient, hook)
            gradient = result
    return gradient


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
    if torch.is_grad_enabled():  # the gradient has a history
        leaf.grad = gradient.clone() if before is None else before + gradient
    elif before is not None:
        before.add_(gradient)
    else:
        leaf.grad = gradient if is_new else gradient.detach().clone()
