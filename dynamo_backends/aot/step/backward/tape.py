"""What the calls of a record leave for its backward passes: the places of user code, open passes.

Each time the calls of a record run they have a tape of their own: while they are recorded, where
they run in eager, and in a trace.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dynamo_backends._torch_private.nodes import edge_of, is_accumulation, make_gradients
from dynamo_backends._torch_private.placeholders import function_mode_depth
from dynamo_backends.aot.step.backward.engine import BackwardPass, Edge, Place, Places, is_executed
from dynamo_backends.interface.errors import StepCaptureError


class Tape:
    """The places of user code in the backward passes of one run.

    Args:
        is_number: In a trace: tells tensors that stand for numbers.

    Attributes:
        is_number: Likewise.
        places: The places.
        nodes: Autograd nodes that user code has looked at.
        regions: Checkpointed regions, by the numbers of their places.
        passes: Open backward passes, each within the one before.
        states: Of torch's generator, as reentrant checkpoints keep them.
        running: The pass that runs nodes now.
        answers: Called with the number of a place and its gradients, where autograd's own engine
            reaches user code: a step that goes on in eager. None: it does not.
    """

    def __init__(self, is_number: Callable[[Any], bool] = lambda _: False) -> None:
        self.is_number = is_number
        self.places: list[Edge] = []
        self.answers: Callable[[int, tuple[Tensor | None, ...]], Any] | None = None
        self.nodes: list[Any] = []
        self._places = Places()
        self._retained: list[tuple[int, Tensor]] = []
        self.passes: list[BackwardPass] = []
        self.regions: dict[int, Any] = {}
        self.running: BackwardPass | None = None
        self.states: list[Tensor] = []

    @property
    def is_new(self) -> bool:
        """Returns whether no call has left anything."""
        return not (
            self.places or self.nodes or self.passes or self.regions or self.states
            or self.answers or self.running
        )  # fmt: skip

    def clear(self) -> None:
        """Lets go of autograd's nodes: those of user code refer to it, a cycle through C++."""
        places = self._places
        for table in (places.hooks, places.before, places.after, places.nodes, self.regions):
            table.clear()
        for several in (self.places, self.nodes, self._retained, self.passes):
            several.clear()

    def add(self, edge: Edge, is_node: bool) -> None:
        """Adds a place: a node whose backward is user code, or hooks on a result."""
        number = len(self.places)
        self.places.append(edge)
        node, i = edge
        if is_node:
            self._places.nodes[node] = number
        else:
            self._places.hooks.setdefault(node, []).append((number, i))

    def add_hook(self, node: Any, is_before: bool) -> None:
        """Adds a place: a hook on a node."""
        hooks = self._places.before if is_before else self._places.after
        hooks.setdefault(node, []).append(len(self.places))
        self.places.append((node, 0))

    def add_retained(self, tensor: Tensor) -> None:
        """Adds a place: where the gradient of a result is retained."""
        self._retained.append((len(self.places), tensor))
        self.places.append(edge_of(tensor))

    def number_of(self, node: Any) -> int:
        """Returns the number of a node among those that user code has looked at."""
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)

    def function_of(self, node: Any) -> int | None:
        """Returns the place of a node whose backward is user code; None for others."""
        return self._places.nodes.get(node)

    def begin(self, depth: int, leaves: Sequence[Edge], **options: Any) -> Place:
        """Begins a pass, as `BackwardPass` does; those that are as deep or deeper are over."""
        of_leaves = {node: leaf_number(i) for i, (node, _) in enumerate(leaves)}
        retained: dict[Any, list[tuple[int, int]]] = {}
        for number, tensor in self._retained:  # its node is another one if it was written to
            node, i = edge_of(tensor)
            retained.setdefault(node, []).append((number, i))
        places = replace(self._places, retained=retained, leaves=of_leaves)
        del self.passes[depth:]
        self.passes.append(BackwardPass(places=places, **options))
        return self.proceed(depth, None)

    def proceed(self, depth: int, reply: Any) -> Place:
        """Goes on with a pass."""
        before, self.running = self.running, self.passes[depth]
        try:
            return self.running.proceed(reply)
        finally:
            self.running = before


def leaf_number(index: int) -> int:
    """Returns the place of a leaf's hooks, by the index of the leaf; and the other way round."""
    return -2 - index


class _Current(threading.local):
    def __init__(self) -> None:
        self.tape = Tape()


_CURRENT = _Current()


def current_tape() -> Tape:
    """Returns the tape of the calls that run in this thread."""
    return _CURRENT.tape


def change_tape(tape: Tape) -> Tape:
    """From now on calls that run in this thread have another tape.

    Returns:
        The one before.
    """
    before = _CURRENT.tape
    _CURRENT.tape = tape
    return before


class UserNode(torch.autograd.Function):
    """The node of an `autograd.Function` of the user's, whose backward is called in its place."""

    apply = vars(torch.autograd.Function)["apply"]  # that of `patches.py` is for the user's

    @staticmethod
    def forward(
        ctx: Any, outputs: Sequence[Tensor], written: Sequence[int], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Gives tensors that have been computed a history."""
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.number = current_tape(), len(current_tape().places)
        ctx.mark_dirty(*(inputs[i] for i in written))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Called by autograd's own engine."""
        if ctx.tape.answers is None:
            raise StepCaptureError("a backward pass of torch reaches user code.")
        return (None, None, *ctx.tape.answers(ctx.number, gradients))


_KINDS: dict[str, type[UserNode]] = {}


def _kind(name: str) -> Any:
    if name not in _KINDS:
        _KINDS[name] = type(name, (UserNode,), {})
    return _KINDS[name]


# The functions that records hold. In a trace a mode gives them the tensors of the trace.


def _is_followed(tensors: tuple[Tensor, ...]) -> bool:
    return has_torch_function(tensors) or function_mode_depth() > 0


def attach(
    name: str, outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...], written: tuple[int, ...]
) -> None:
    """Attaches the node of a function of the user's to what it has computed.

    Args:
        name: Of the function.
        outputs: Its differentiable results.
        inputs: The tensors among its arguments.
        written: Which of these it has written to, and returns.
    """
    tensors = (*outputs, *inputs)
    if _is_followed(tensors):
        handle_torch_function(attach, tensors, name, outputs, inputs, written)
        return
    _kind(name).apply(outputs, written, *inputs)
    current_tape().add((outputs[0].grad_fn, 0), is_node=True)


def mark(tensor: Tensor) -> None:
    """Marks the place of hooks on a result."""
    if _is_followed((tensor,)):
        handle_torch_function(mark, (tensor,), tensor)
        return
    current_tape().add(edge_of(tensor), is_node=False)


def retain(tensor: Tensor) -> None:
    """Marks a result whose gradient is retained."""
    if _is_followed((tensor,)):
        handle_torch_function(retain, (tensor,), tensor)
        return
    tensor.retain_grad()
    current_tape().add_retained(tensor)


def find_node(tensor: Tensor) -> tuple[int, str]:
    """Finds where a tensor's gradient arrives: the number of the node, and its name."""
    if _is_followed((tensor,)):
        found: tuple[int, str] = handle_torch_function(find_node, (tensor,), tensor)
        return found
    node, _ = edge_of(tensor)
    return current_tape().number_of(node), node.name()


def find_edges(number: int) -> tuple[Any, ...]:
    """Finds what follows a node in a backward pass.

    Returns:
        For each of its results which input it is of what: a leaf, the place of a function of the
        user's, or number and name of another node; None where there is nothing.
    """
    if function_mode_depth():
        edges: tuple[Any, ...] = handle_torch_function(find_edges, (), number)
        return edges
    tape = current_tape()
    found: list[Any] = []
    for node, i in tape.nodes[number].next_functions:
        place = tape.function_of(node)
        if node is None:
            found.append(None)
        elif is_accumulation(node):
            found.append((i, node.variable))
        elif place is not None:
            found.append((i, place))
        else:
            found.append((i, tape.number_of(node), node.name()))
    return tuple(found)


def mark_node(number: int, is_before: bool) -> int:
    """Marks the place of a hook on a node; returns how many results the node has."""
    if function_mode_depth():
        count: int = handle_torch_function(mark_node, (), number, is_before)
        return count
    tape = current_tape()
    node = tape.nodes[number]
    tape.add_hook(node, is_before)
    return len(node.next_functions)


def asks_for(roots: tuple[Tensor, ...], ends: tuple[Tensor, ...] | None, number: int) -> bool:
    """Returns whether a backward pass calls a node.

    Args:
        roots: Where it begins.
        ends: What gradients are asked for; None: those of all leaves.
        number: Of the node; negative: its place is -1 - number.
    """
    tensors = (*roots, *(ends or ()))
    if _is_followed(tensors):
        is_asked: bool = handle_torch_function(asks_for, tensors, roots, ends, number)
        return is_asked
    tape = current_tape()
    node = tape.nodes[number] if number >= 0 else tape.places[-1 - number][0]
    of_ends = None if ends is None else [edge_of(t)[0] for t in ends]
    return is_executed(node, [edge_of(t)[0] for t in roots], of_ends)


def accumulate(leaves: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Accumulates gradients of leaves without hooks, between the hooks of others."""
    tensors = (*leaves, *gradients)
    if _is_followed(tensors):
        handle_torch_function(accumulate, tensors, leaves, gradients)
        return
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if leaf.grad is None:
            leaf.grad = gradient
        elif leaf.grad.is_sparse and not gradient.is_sparse:
            leaf.grad = gradient + leaf.grad
        else:
            leaf.grad.add_(gradient)


MARKS = (retain, find_node, find_edges, mark_node, asks_for)
"""What is part of a record although it computes nothing."""


def begin(
    depth: int,
    roots: tuple[Tensor, ...],
    gradients: tuple[Tensor | None, ...],
    leaves: tuple[Tensor, ...],
    captures: tuple[Tensor, ...] | None,
    targets: tuple[Tensor, ...] | None,
    *,
    retain_graph: bool,
    create_graph: bool,
) -> Place:
    """Begins a backward pass, up to the first place of user code.

    Args:
        depth: How many passes it is part of.
        roots: Where it begins.
        gradients: Of the roots; None where it is one.
        leaves: Those with hooks.
        captures: What gradients are asked for; None: those of leaves are accumulated.
        targets: The leaves that accumulate; None: all.
        retain_graph: Whether another pass may follow.
        create_graph: Whether gradients have a history.
    """
    tensors = (*roots, *(g for g in gradients if g is not None), *leaves, *(captures or ()),
               *(targets or ()))  # fmt: skip
    if _is_followed(tensors):
        place: Place = handle_torch_function(
            begin, tensors, depth, roots, gradients, leaves, captures, targets,
            retain_graph=retain_graph, create_graph=create_graph,
        )  # fmt: skip
        return place
    return current_tape().begin(
        depth, [edge_of(leaf) for leaf in leaves], roots=[edge_of(root) for root in roots],
        gradients=make_gradients(roots, gradients, is_grads_batched=False),
        retain_graph=retain_graph, create_graph=create_graph,
        captures=None if captures is None else [edge_of(t) for t in captures],
        targets=None if targets is None else [edge_of(t)[0] for t in targets],
    )  # fmt: skip


def proceed(depth: int, reply: tuple[Tensor | None, ...]) -> Place:
    """Goes on with a backward pass, up to the next place of user code.

    Args:
        depth: How many passes it is part of.
        reply: What user code has made of the gradients at the last place.
    """
    tensors = tuple(t for t in reply if t is not None)
    if _is_followed(tensors):
        place: Place = handle_torch_function(proceed, tensors, depth, reply)
        return place
    return current_tape().proceed(depth, reply)
