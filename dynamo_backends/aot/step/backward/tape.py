"""Records what calls leave for backward passes: places of user code, open passes.

Each time the calls of a record run they have a tape of their own: while they are recorded, where
they run in eager, and in a trace.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from dynamo_backends._torch_private import accumulate_grad_node
from dynamo_backends._torch_private.autograd_nodes import (
    autograd_node_class,
    gradient_edge,
    is_accumulation,
    make_gradients,
)
from dynamo_backends._torch_private.pending_tensors import (
    function_mode_depth,
    pop_function_mode,
    push_function_mode,
)
from dynamo_backends.aot.step.backward.engine import (
    BackwardPass,
    CallbackSites,
    Edge,
    Place,
    is_executed,
)
from dynamo_backends.interface.errors import StepCaptureError

P = ParamSpec("P")
R = TypeVar("R")


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
        states: States of torch's generator, as reentrant checkpoints keep them.
        running: The pass that runs nodes now.
        answers: Called with the number of a place and its gradients, where autograd's own engine
            reaches user code: a step that goes on in eager. None: it does not.
    """

    def __init__(self, is_number: Callable[[Any], bool] = lambda _: False) -> None:
        self.is_number = is_number
        self.places: list[Edge] = []
        self.answers: Callable[[int, tuple[Tensor | None, ...]], Any] | None = None
        self.nodes: list[Any] = []
        self._places = CallbackSites()
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
        self.places.append(gradient_edge(tensor))

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
            node, i = gradient_edge(tensor)
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
            raise StepCaptureError(
                "the backward pass of autograd calls user code, which compile_step does not "
                'support here. Pass fallback="split" to run the step in parts.'
            )
        return (None, None, *ctx.tape.answers(ctx.number, gradients))


_KINDS: dict[str, type[UserNode]] = {}


def _kind(name: str) -> Any:
    if name not in _KINDS:
        _KINDS[name] = type(name, (UserNode,), {})
    return _KINDS[name]


# The functions that records hold. In a trace a mode gives them the tensors of the trace.


def dispatch_to_function_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that torch function modes see its calls."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not function_mode_depth():
            return function(*args, **kwargs)
        mode = pop_function_mode()  # as `torch.overrides.handle_torch_function`, in less time
        try:
            return mode.__torch_function__(call, (), args, kwargs)
        finally:
            push_function_mode(mode)

    return call


@dispatch_to_function_mode
def attach_function_node(
    name: str, outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...], written: tuple[int, ...]
) -> None:
    """Attaches the autograd node of a user's `autograd.Function` to its outputs.

    Args:
        name: Name of the function.
        outputs: Its differentiable results.
        inputs: The tensors among its arguments.
        written: Which of these it has written to, and returns.
    """
    _kind(name).apply(outputs, written, *inputs)
    current_tape().add((outputs[0].grad_fn, 0), is_node=True)


@dispatch_to_function_mode
def mark_hooked_result(tensor: Tensor) -> None:
    """Marks a result with tensor hooks as a stop of the backward pass."""
    current_tape().add(gradient_edge(tensor), is_node=False)


@dispatch_to_function_mode
def mark_retained_grad(tensor: Tensor) -> None:
    """Calls `retain_grad` on a result and marks it as a stop of the backward pass."""
    tensor.retain_grad()
    current_tape().add_retained(tensor)


@dispatch_to_function_mode
def find_node(tensor: Tensor) -> tuple[int, str]:
    """Finds where a tensor's gradient arrives: the number of the node, and its name."""
    node, _ = gradient_edge(tensor)
    return current_tape().number_of(node), node.name()


@dispatch_to_function_mode
def find_edges(number: int) -> tuple[Any, ...]:
    """Finds what follows a node in a backward pass.

    Returns:
        For each of its results which input it is of what: a leaf, the place of a function of the
        user's, or number and name of another node; None where there is nothing.
    """
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


@dispatch_to_function_mode
def mark_node(number: int, is_before: bool) -> int:
    """Marks the place of a hook on a node; returns how many results the node has."""
    tape = current_tape()
    node = tape.nodes[number]
    tape.add_hook(node, is_before)
    return len(node.next_functions)


@dispatch_to_function_mode
def backward_reaches_node(
    roots: tuple[Tensor, ...], ends: tuple[Tensor, ...] | None, number: int
) -> bool:
    """Returns whether a backward pass from these roots reaches a node.

    Args:
        roots: Where it begins.
        ends: What gradients are asked for; None: those of all leaves.
        number: Number of the node; negative: its place is -1 - number.
    """
    tape = current_tape()
    node = tape.nodes[number] if number >= 0 else tape.places[-1 - number][0]
    of_ends = None if ends is None else [gradient_edge(t)[0] for t in ends]
    return is_executed(node, [gradient_edge(t)[0] for t in roots], of_ends)


MARKS = (mark_retained_grad, find_node, find_edges, mark_node, backward_reaches_node)
"""What is part of a record although it computes nothing."""


@dispatch_to_function_mode
def begin_backward(
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
    """Runs a backward pass up to the first user code; returns that stop's number.

    Args:
        depth: How many passes it is part of.
        roots: Where it begins.
        gradients: Gradients of the roots; None where it is one.
        leaves: Those with hooks.
        captures: What gradients are asked for; None: those of leaves are accumulated.
        targets: The leaves that accumulate; None: all.
        retain_graph: Whether another pass may follow.
        create_graph: Whether gradients have a history.
    """
    return current_tape().begin(
        depth, [gradient_edge(leaf) for leaf in leaves],
        roots=[gradient_edge(root) for root in roots],
        gradients=make_gradients(roots, gradients, is_grads_batched=False),
        retain_graph=retain_graph, create_graph=create_graph,
        captures=None if captures is None else [gradient_edge(t) for t in captures],
        targets=None if targets is None else [gradient_edge(t)[0] for t in targets],
    )  # fmt: skip


@dispatch_to_function_mode
def resume_backward(depth: int, reply: tuple[Tensor | None, ...]) -> Place:
    """Resumes a backward pass with the user code's gradients, up to the next stop.

    Args:
        depth: How many passes it is part of.
        reply: What user code has made of the gradients at the last place.
    """
    return current_tape().proceed(depth, reply)


class GraphNode:
    """The autograd node of a result; like `torch.autograd.graph.Node`.

    Args:
        passes: The places of user code of its segment.
        number: Number of the node, among those that user code has looked at.
        name: As `name` returns it.
    """

    def __init__(self, passes: Any, number: int, name: str):
        self._passes = passes
        self._segment = passes.session.segment
        self._name = name
        self.number = number
        self.metadata: dict[Any, Any] = {}

    def name(self) -> str:
        """Returns the node's name."""
        return self._name

    def register_hook(self, hook: Any) -> RemovableHandle:
        """As of an autograd node."""
        return self._register(hook, is_before=False)

    def register_prehook(self, hook: Any) -> RemovableHandle:
        """As of an autograd node."""
        return self._register(hook, is_before=True)

    def _register(self, hook: Any, is_before: bool) -> RemovableHandle:
        if self.is_past:  # nobody holds what was computed: no backward pass goes there
            return RemovableHandle({0: hook})
        if self._passes.session.following:
            return self._passes.add_node_hook(self.number, hook, is_before)
        node = self.real
        handle = node.register_prehook(hook) if is_before else node.register_hook(hook)
        return handle

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """As of an autograd node."""
        edges = () if self.is_past else find_edges(self.number)
        return tuple((None, 0) if e is None else (self._node(*e[1:]), e[0]) for e in edges)

    def _node(self, target: Any, name: str | None = None) -> Any:
        if name is not None:
            return self._passes.graph_node(target, name)
        if isinstance(target, int):
            return self._passes.context_at(target)
        with self._passes.session.own_calls():
            return accumulate_grad_node(target)

    @property
    def is_past(self) -> bool:
        """Returns whether the calls of the step that it belongs to are over."""
        return self._passes.session.segment is not self._segment

    @property
    def real(self) -> Any:
        """The node itself, where the step runs in eager."""
        return current_tape().nodes[self.number]

    def __getattr__(self, name: str) -> Any:
        """Sends the step on in eager for any other attribute of a node."""
        kind = autograd_node_class(self._name)
        if self.is_past or (kind is not None and not hasattr(kind, name)):
            raise AttributeError(f"{self._name!r} object has no attribute {name!r}")
        self._passes.session.go_eager("accesses the autograd graph (grad_fn)")
        return getattr(self.real, name)

    def __repr__(self) -> str:
        """As of an autograd node."""
        return f"<{self._name} object at {id(self):#x}>"


Node.register(GraphNode)

_GRAPH_NODES: dict[str, type[GraphNode]] = {}


def graph_node(passes: Any, number: int, name: str) -> GraphNode:
    """Makes a node, whose class has its name."""
    if name not in _GRAPH_NODES:
        _GRAPH_NODES[name] = type(name, (GraphNode,), {})
    return _GRAPH_NODES[name](passes, number, name)
