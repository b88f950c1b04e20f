"""Autograd's engine in Python: a backward pass that stops where user code has its turn.

The nodes are those of autograd, and so is the order: nodes that are ready run by falling sequence
number. Between two places of user code a pass is a computation like any other, so a step's record
holds it as calls (`backward_passes.py`), with the user's code between them.
"""

import heapq
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private.autograd_nodes import (
    input_metadata,
    is_accumulation,
    run_autograd_node,
    saves_tensors,
    sequence_number,
)

DONE = -1
"""What a pass yields as its last place."""

Place = tuple[int, tuple[Tensor | None, ...]]
"""A place of user code, by its number, and the gradients that have arrived there."""

Edge = tuple[Any, int]
"""An autograd node, and which of its inputs."""

_USED = "dynamo_backends: saved tensors are freed"


class RecomputationNeeded(Exception):
    """Raised when an autograd node needs tensors that a checkpoint has not saved."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@dataclass
class CallbackSites:
    """Lists, per autograd node, where a backward pass calls user code (hooks, functions).

    Attributes:
        hooks: Numbers of hooks on results and which of a node's inputs they are on, by node; in the
            order of registration.
        retained: Likewise of results that retain their gradients.
        before: Numbers of hooks before a node, in the order of registration.
        after: And after it; these get what it has computed and then what it got.
        nodes: Numbers of nodes whose backward is user code.
        leaves: Numbers of leaves with hooks, by the node that accumulates.
    """

    hooks: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)
    retained: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)
    before: dict[Any, list[int]] = field(default_factory=dict)
    after: dict[Any, list[int]] = field(default_factory=dict)
    nodes: dict[Any, int] = field(default_factory=dict)
    leaves: dict[Any, int] = field(default_factory=dict)


@dataclass
class _Ready:
    """A node that is ready; `heapq` orders equal ones as the heap of C++ does."""

    node: Any
    number: int

    def __lt__(self, other: "_Ready") -> bool:
        return self.number > other.number


class BackwardPass:
    """One backward pass of a step, with the user code in it.

    Args:
        roots: Where it begins.
        gradients: Gradients of the roots.
        places: Where user code has its turn.
        retain_graph: Whether another pass may follow.
        create_graph: Whether gradients have a history.
        captures: Edges whose gradients are returned; None: those of all leaves are accumulated.
        targets: Nodes of leaves that accumulate; None: all.

    Attributes:
        create_graph: Whether gradients have a history.
        recomputed: Tensors that checkpoints have recomputed for it, by their places.
    """

    def __init__(
        self,
        roots: Sequence[Edge],
        gradients: Sequence[Tensor | None],
        places: CallbackSites,
        *,
        retain_graph: bool,
        create_graph: bool,
        captures: Sequence[Edge] | None = None,
        targets: Sequence[Any] | None = None,
    ):
        self.create_graph = create_graph
        self.recomputed: dict[int, list[Tensor]] = {}
        self._places = places
        self._frees = not retain_graph
        self._captures = captures or ()
        self._captured: dict[Edge, Tensor | None] = {}
        self._buffers: dict[Any, list[Tensor | None]] = {}
        self._heap: list[_Ready] = []
        self._waiting = _count_edges([node for node, _ in roots])
        ends = None
        if captures is not None or targets is not None:
            ends = {node for node, _ in captures or ()} | set(targets or ())
        self._targets = set(targets or ())
        self._needed = None if ends is None else _leading_to(ends, self._waiting)
        self._run = self._start(roots, gradients)
        next(self._run)

    def proceed(self, reply: Any) -> Place:
        """Runs up to the next place of user code.

        Args:
            reply: What the last one has made of its gradients; None at the beginning.
        """
        with torch.set_grad_enabled(self.create_graph):
            try:
                return self._run.send(reply)
            except StopIteration:
                return DONE, tuple(self._captured.get(edge) for edge in self._captures)

    def _start(
        self, roots: Sequence[Edge], gradients: Sequence[Tensor | None]
    ) -> Generator[Any, Any, None]:
        yield None
        for edge, gradient in zip(roots, gradients, strict=True):
            self._send(edge, gradient)
        while self._heap:
            node = heapq.heappop(self._heap).node
            arrived = self._buffers.pop(node)
            yield from self._process(node, arrived)

    def _process(self, node: Any, arrived: list[Tensor | None]) -> Generator[Place, Any, None]:
        places = self._places
        for number, i in (*places.hooks.get(node, ()), *places.retained.get(node, ())):
            (arrived[i],) = yield number, (arrived[i],)
        if (node, 0) in self._captures and node in places.leaves:
            (arrived[0],) = yield places.leaves[node], (arrived[0],)
        for i, gradient in enumerate(arrived):
            if (node, i) in self._captures:
                self._captured[node, i] = gradient
        if self._needed is not None and not self._needed.get(node) and node not in self._targets:
            return
        if node in places.leaves:
            yield places.leaves[node], (arrived[0],)
            return
        if is_accumulation(node):
            _accumulate(node, arrived)
            return
        for number in places.before.get(node, ()):
            arrived = list((yield number, tuple(arrived)))
        if node in places.nodes:
            results = yield places.nodes[node], tuple(arrived)
        else:
            results = yield from self._call(node, arrived)
        edges = node.next_functions
        results = [_fitted(g, edge, node) for g, edge in zip(results, edges, strict=True)]
        for number in places.after.get(node, ()):
            results = yield number, (*results, *arrived)
        del arrived
        for edge, gradient in zip(edges, results, strict=True):
            if edge[0] is not None:
                self._send(edge, gradient)

    def _call(self, node: Any, arrived: list[Tensor | None]) -> Generator[Place, Any, Any]:
        frees = self._frees and saves_tensors(node)
        if frees and _USED in node.metadata:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved "
                "tensors after they have already been freed). Specify retain_graph=True if you "
                "need to backward through the graph a second time."
            )
        while True:
            try:
                results = run_autograd_node(node, arrived)
                break
            except RecomputationNeeded as needed:
                number = needed.number
            yield number, ()
        if frees:
            node.metadata[_USED] = True
        return results

    def _send(self, edge: Edge, gradient: Tensor | None) -> None:
        node, i = edge
        waiting, needed = self._waiting, self._needed
        waiting[node] -= 1
        if needed is not None and node not in needed:
            return
        buffer = self._buffers.get(node)
        if buffer is None:
            buffer = self._buffers[node] = [None] * len(input_metadata(node))
        if gradient is not None:
            before = buffer[i]
            buffer[i] = gradient if before is None else before + gradient
        if waiting[node] == 0:
            heapq.heappush(self._heap, _Ready(node, sequence_number(node)))


def _count_edges(roots: Sequence[Any]) -> dict[Any, int]:
    """Returns the nodes that a pass reaches, and how many gradients each of them waits for."""
    waiting: dict[Any, int] = {}
    for root in roots:
        waiting[root] = waiting.get(root, 0) + 1
    stack = list(dict.fromkeys(roots))
    seen = set(stack)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None:
                waiting[node] = waiting.get(node, 0) + 1
                if node not in seen:
                    seen.add(node)
                    stack.append(node)
    return waiting


def is_executed(node: Any, roots: Sequence[Any], ends: Sequence[Any] | None) -> bool:
    """Returns whether a pass calls a node, or returns a gradient that arrives there.

    Args:
        node: The node.
        roots: The nodes where the pass begins.
        ends: Those whose gradients are asked for; None: the pass goes to all leaves.
    """
    reached = _count_edges(roots)
    return node in reached and (ends is None or node in _leading_to(set(ends), reached))


def _leading_to(ends: set[Any], nodes: Mapping[Any, int]) -> dict[Any, bool]:
    """The nodes that a pass reaches on its way to some, and whether it goes on from there."""
    leads: dict[Any, bool] = {}
    for start in nodes:
        stack = [start]
        while stack:
            node = stack[-1]
            if node in leads:
                stack.pop()
                continue
            below = [n for n, _ in node.next_functions if n is not None]
            todo = [n for n in below if n not in leads]
            if todo:
                stack += todo
                continue
            leads[node] = any(leads[n] or n in ends for n in below)
            stack.pop()
    return {node: goes_on for node, goes_on in leads.items() if goes_on or node in ends}


def _fitted(gradient: Tensor | None, edge: Edge, node: Any) -> Tensor | None:
    """Returns a gradient in the shape and dtype of what it is the gradient of."""
    if gradient is None or edge[0] is None:
        return None
    wanted = input_metadata(edge[0])[edge[1]]
    if gradient.shape != wanted.shape:
        try:
            gradient = gradient.sum_to_size(wanted.shape)
        except RuntimeError as error:
            raise RuntimeError(
                f"Function {node.name()} returned an invalid gradient: got "
                f"{list(gradient.shape)} but expected shape compatible with {list(wanted.shape)}"
            ) from error
    if gradient.dtype is not wanted.dtype:
        if gradient.is_complex() and not wanted.dtype.is_complex:
            gradient = torch.real(gradient)
        gradient = gradient.to(wanted.dtype)
    if gradient.device != wanted.device:
        if gradient.ndim:
            raise RuntimeError(
                f"Function {node.name()} returned an invalid gradient: expected device "
                f"{wanted.device} but got {gradient.device}"
            )
        gradient = gradient.to(wanted.device)
    return gradient


def _accumulate(node: Any, arrived: list[Tensor | None]) -> None:
    gradient = arrived.pop()
    if gradient is None:
        return
    leaf = node.variable
    is_unshared = sys.getrefcount(gradient) == _UNSHARED and gradient.layout is torch.strided
    if (
        leaf.grad is None
        and is_unshared
        and not torch.is_grad_enabled()
        and gradient.stride() == leaf.stride()
    ):
        leaf.grad = gradient.detach()
    else:
        run_autograd_node(node, [gradient])


def _references() -> int:
    """Returns `sys.getrefcount` of a gradient in `_accumulate` to which nothing else refers."""
    values = [torch.empty(0)]
    value = values.pop()
    return sys.getrefcount(value)


_UNSHARED = _references()
