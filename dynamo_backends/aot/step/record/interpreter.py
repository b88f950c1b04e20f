"""Runs the calls of a record: with real tensors in eager, or with those of a trace."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import amp_scaling
from dynamo_backends.aot.step.backward.tape import begin_backward, resume_backward
from dynamo_backends.aot.step.record.templates import Items, Ref, fill, refs
from dynamo_backends.aot.step.record.trie import Entry, State
from dynamo_backends.aot.step.source_lines import recorded_at
from dynamo_backends.aot.step.state.hyperparameters import group_numbers, replace, restoring_groups
from dynamo_backends.interface.errors import StepCaptureError

TakeStep = Callable[[Any, Sequence[Tensor]], None]
"""Takes a step of an optimizer, unless a flag of overflow is set (see `GradScaler.step`)."""

Numbers = dict[int, list[Any]]
"""The numbers of optimizers, by the ids of these, as they were when each took its step."""


@contextlib.contextmanager
def using_torch_state(state: State) -> Iterator[None]:
    """Sets the grad mode, hooks and autocast of a recorded call (context manager)."""
    grad, hooks, autocast = state
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        if hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
        for kind in ("cpu", "cuda"):
            dtype = dict(autocast).get(kind)
            if dtype is not None:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def setting_group_numbers(
    optimizers: Sequence[torch.optim.Optimizer], numbers: Numbers
) -> Iterator[None]:
    """Sets optimizers' numbers to those of their last step (context manager)."""
    with restoring_groups(optimizers):
        for optimizer in (o for o in optimizers if id(o) in numbers):
            places = list(group_numbers([optimizer]))
            for place, number in zip(places, numbers[id(optimizer)], strict=True):
                replace(*place, number)
        yield


def execute(
    entries: Sequence[Entry],
    tensors: dict[int, Any],
    number: Callable[[int], Any],
    outputs: Sequence[int] = (),
    at: Callable[[Entry], None] = lambda _: None,
    take_step: TakeStep = amp_scaling.step_without_overflow,
) -> None:
    """Runs the calls of a record.

    Args:
        entries: The calls.
        tensors: Slots and inputs by their numbers; gets what is computed.
        number: Gives numbers that are inputs.
        outputs: What is needed in the end, besides what later calls take.
        at: Called before each of them.
        take_step: Takes the steps of optimizers; by default as in eager.
    """
    needed = {n for e in entries for n in (*refs(e.args), *refs(e.kwargs))}.union(outputs)
    for entry in entries:
        if entry.kind == "read":
            continue
        at(entry)
        with using_torch_state(entry.state), recorded_at(entry.line):
            _run(entry, tensors, number, take_step)
        for target, value in entry.gradients.items():
            if value in entry.made and value in needed:
                tensors[value] = tensors[target].grad


def _run(
    entry: Entry,
    tensors: dict[int, Any],
    number: Callable[[int], Any],
    take_step: TakeStep,
) -> None:
    args = fill(entry.args, tensors.__getitem__, number)
    kwargs = fill(entry.kwargs, tensors.__getitem__, number)
    if entry.kind == "optimizer":
        with without_hooks(entry.function[1]):
            take_step(entry.function[1], args)
    elif entry.kind == "zero_grad":
        entry.function[1].zero_grad(*args, **kwargs)
    else:
        result = entry.function(*args, **kwargs)
        if (
            entry.function in (begin_backward, resume_backward)
            and result[0] != entry.result.items[0]
        ):
            raise StepCaptureError(
                'the backward pass runs in a different order than in eager. Pass fallback="split" '
                "to run the step in parts."
            )
        _store(entry.result, result, tensors)


def _store(template: Any, result: Any, tensors: dict[int, Any]) -> None:
    if type(template) is Ref:
        tensors[template.value] = result
    elif type(template) is Items:
        values = result.values() if isinstance(result, dict) else result
        for inner, value in zip(template.items, values, strict=True):
            _store(inner, value, tensors)


def freed_by_backward(
    path: Sequence[Entry], roots: Sequence[int], history: Collection[int]
) -> set[int]:
    """Returns numbers of the tensors whose autograd history a backward pass frees.

    Args:
        path: The calls before it.
        roots: Where it begins.
        history: The tensors that have one; it does not go beyond others, such as detached ones.
    """
    found = set(roots).intersection(history)
    for entry in reversed(path):
        given = {*refs(entry.args), *refs(entry.kwargs)}
        is_written = entry.mutates and not found.isdisjoint(given)
        if is_written or not found.isdisjoint(entry.made):
            found |= given.intersection(history)
    return found


@contextlib.contextmanager
def without_hooks(optimizer: Any) -> Iterator[None]:
    """Removes an optimizer's step hooks (context manager)."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    hooks = {name: vars(optimizer)[name] for name in names}
    try:
        vars(optimizer).update({name: OrderedDict() for name in names})
        yield
    finally:
        vars(optimizer).update(hooks)
