"""Backward passes with user code in them, in a session: they stop where it has its turn.

A pass is a few calls of the record, `begin` and `proceed`, and between them the calls of hooks and
of backwards of `autograd.Function`. In eager and in a trace `engine.py` runs the parts; in a replay
the record says where the next place of user code is.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dynamo_backends._torch_private import saved_tensors_hooks
from dynamo_backends._torch_private.nodes import NO_TASK, graph_task, is_accumulation
from dynamo_backends.aot.step.backward.checkpoints import (
    CheckpointPlace,
    SavedTensors,
    is_of_region,
    save_in_region,
)
from dynamo_backends.aot.step.backward.engine import DONE
from dynamo_backends.aot.step.backward.generator_states import GeneratorState
from dynamo_backends.aot.step.backward.graph_nodes import GraphNode, graph_node
from dynamo_backends.aot.step.backward.hooks import (
    Gradients,
    HookPlace,
    NodeHookPlace,
    RetainedPlace,
    Tables,
    are_tensors,
    as_tuple,
    backward_without_hooks,
    call_hooks,
    checked_gradients,
    is_hooked,
    on_input,
    options_of,
    register_on,
    table_of,
)
from dynamo_backends.aot.step.backward.tape import (
    Tape,
    accumulate,
    asks_for,
    begin,
    change_tape,
    current_tape,
    find_node,
    leaf_number,
    mark,
    mark_node,
    proceed,
    retain,
)
from dynamo_backends.aot.step.record.autograd_functions import Context, FunctionPlace
from dynamo_backends.aot.step.record.segment import Segment


@dataclass
class OpenPass:
    """A backward pass that has begun.

    Attributes:
        task: What `torch._C._current_graph_task_id` tells hooks of it.
        roots: Where it begins.
        ends: What gradients are asked for; None: those of all leaves.
        is_divided: Whether it is divided at the places of user code.
        callbacks: What is called when it is over.
    """

    task: int
    roots: tuple[Tensor, ...]
    ends: tuple[Tensor, ...] | None
    is_divided: bool
    callbacks: list[Callable[[], Any]] = field(default_factory=list)


_TASKS = itertools.count(1 << 40)  # those of autograd's own engine are small


class NestedPasses:
    """The places of user code in the backward passes of a segment."""

    def __init__(self, session: Any):
        self._session = session
        self._open: list[OpenPass] = []
        self._places: list[Callable[[Gradients], Any]] = []
        self._contexts: dict[int, Context] = {}
        self._nodes: dict[int, GraphNode] = {}
        self._states = 0
        self._regions: list[tuple[CheckpointPlace, bool]] = []

    def renew(self) -> None:
        """A segment begins."""
        self._places = []
        self._contexts = {}
        self._nodes = {}
        self._states = 0
        if not current_tape().is_new:
            before = change_tape(Tape())
            if before.answers is None:
                before.clear()

    @property
    def segment(self) -> Segment:
        """The calls since the last cut."""
        segment: Segment = self._session.segment
        return segment

    @property
    def is_followed(self) -> bool:
        """Returns whether calls are compared or recorded."""
        is_followed: bool = self._session.following
        return is_followed

    def go_eager(self, reason: str) -> None:
        """The step goes on in eager."""
        if self.is_followed:
            self._session.go_eager(reason)

    def own_calls(self) -> contextlib.AbstractContextManager[None]:
        """Inside: torch calls are ours, not the step's."""
        own: contextlib.AbstractContextManager[None] = self._session.own_calls()
        return own

    @property
    def is_open(self) -> bool:
        """Returns whether a backward pass has begun, and is not over."""
        return bool(self._open)

    # Autograd nodes, and what hooks ask of the pass that calls them

    def node_of(self, tensor: Tensor) -> GraphNode:
        """Returns the autograd node of a result with a history."""
        with self._session:
            return self.graph_node(*find_node(tensor))

    def graph_node(self, number: int, name: str) -> GraphNode:
        """Returns the stand-in for the autograd node of a result."""
        if number not in self._nodes:
            self._nodes[number] = graph_node(self, number, name)
        return self._nodes[number]

    def context_at(self, number: int) -> Context:
        """Returns the node that is user code and has a place."""
        place = self._places[number]
        assert isinstance(place, FunctionPlace)
        return place.context

    def add_node_hook(self, number: int, hook: Any, is_before: bool) -> RemovableHandle:
        """Registers a hook on an autograd node."""
        hooks, handle = table_of(hook)
        count = mark_node(number, is_before)
        self._places.append(NodeHookPlace(hooks, None if is_before else count))
        return handle

    @property
    def task(self) -> int:
        """The number of the pass that is running; `NO_TASK`: there is none."""
        task = graph_task()
        return self._open[-1].task if task == NO_TASK and self._open else task

    @property
    def depth(self) -> int:
        """How many divided passes the one that is running is part of; -1: it is not divided."""
        return sum(each.is_divided for each in self._open) - 1 if graph_task() == NO_TASK else -1

    def queue_callback(self, callback: Callable[[], Any]) -> None:
        """Has something called when the pass is over."""
        self._open[-1].callbacks.append(callback)

    def asks_for(self, node: Any) -> bool:
        """Returns whether the pass calls a node."""
        this = self._open[-1]
        if isinstance(node, GraphNode):
            return not node.is_past and asks_for(this.roots, this.ends, node.number)
        for number, place in enumerate(self._places):
            if isinstance(place, FunctionPlace) and place.context is node:
                return asks_for(this.roots, this.ends, -1 - number)
        if not is_accumulation(node):
            return False
        number, _ = find_node(node.variable)
        return asks_for(this.roots, this.ends, number)

    @contextlib.contextmanager
    def _pass(
        self,
        roots: tuple[Tensor, ...],
        ends: tuple[Tensor, ...] | None = None,
        *,
        is_divided: bool = False,
        create_graph: bool = False,
    ) -> Iterator[int]:
        """Inside: a backward pass runs; yields how many divided ones it is part of."""
        depth = self.depth + 1
        this = OpenPass(next(_TASKS), roots, ends, is_divided)
        self._open.append(this)
        try:
            yield depth
            if this.callbacks:
                with self._session, torch.set_grad_enabled(create_graph):
                    for callback in this.callbacks:  # which may add others
                        callback()
        finally:
            self._open.pop()

    def context_of(self, tensor: Tensor) -> Context | None:
        """Returns the node that is user code and has made a tensor."""
        number = self._session.segment.number_of(tensor) if self._contexts else None
        return None if number is None else self._contexts.get(number)

    def name_of_history(self, number: int) -> str:
        """Returns the name of such a node, by the number of the tensor; empty if there is none."""
        context = self._contexts.get(number)
        return "" if context is None else context.name()

    def add_function(self, place: FunctionPlace, outputs: Sequence[Tensor]) -> None:
        """Adds what `tape.attach` has made a place of."""
        self._places.append(place)
        segment = self._session.segment
        for output in outputs:
            number = segment.number_of(output)
            if number is not None:
                self._contexts[number] = place.context

    @property
    def next_place(self) -> int:
        """The number of the place that is added next."""
        return len(self._places)

    def next_state(self) -> GeneratorState:
        """What stands for the state of torch's generator that has just been kept."""
        self._states += 1
        return GeneratorState(self._states - 1)

    @property
    def is_in_region(self) -> bool:
        """Returns whether calls are part of a checkpointed region."""
        hooks = saved_tensors_hooks()
        return hooks is not None and is_of_region(hooks)

    @contextlib.contextmanager
    def in_region(self, place: CheckpointPlace, is_second: bool) -> Iterator[None]:
        """Inside: calls are part of a checkpointed region."""
        before = self._regions
        self._regions = [*before, (place, is_second)]
        try:
            yield
        finally:
            self._regions = before

    def save_in_region(self, tensors: Sequence[Tensor]) -> SavedTensors | None:
        """Has the innermost region save tensors; None: they are there as long as its results."""
        if not tensors:
            return None
        place, is_second = self._regions[-1]
        saved = place.save(tensors, is_second)
        save_in_region(*tensors)
        return saved

    def add_region(self, place: CheckpointPlace) -> None:
        """Adds what `checkpoints.open_region` has made a place of."""
        self._places.append(place)

    def add_hook(self, tensor: Tensor, hook: Any) -> RemovableHandle:
        """Registers a hook on a result."""
        hooks, handle = table_of(hook)
        with self._session:
            mark(tensor)
        self._places.append(HookPlace(self.segment.number_of(tensor), hooks))
        return handle

    def retain(self, tensor: Tensor) -> None:
        """Has the gradient of a result become its attribute."""
        if self.retains(tensor):
            return
        with self._session:
            retain(tensor)
        number = self.segment.number_of(tensor)
        assert number is not None
        self._places.append(RetainedPlace(number, self._find))

    def _find(self, number: int) -> Tensor | None:
        if self._session.replaying:
            placeholder: Tensor = self.segment.trie.value(number)
            return placeholder
        return self.segment.real(number)

    def retains(self, tensor: Tensor) -> bool:
        """Returns whether the gradient of a result becomes its attribute."""
        number = self.segment.number_of(tensor)
        retained = (p.tensor for p in self._places if isinstance(p, RetainedPlace))
        return number is not None and number in retained

    # Passes

    def backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follows a backward pass that accumulates gradients, and calls the hooks in it."""
        session = self._session
        if self._is_anomaly_detected():
            return func(*args, **kwargs)
        hooked = session.segment.hooked_leaves(session.replaying)
        if not hooked and not self._places:
            return session.call("backward", func, args, kwargs)
        given = options_of(func, args, kwargs)
        if func is Tensor.backward and "inputs" in given:
            with session:  # which checks them, and makes a tuple of a dictionary
                return torch.autograd.backward(**given)
        if not self._is_followed(given):
            return func(*args, **kwargs)
        create = bool(given.get("create_graph"))
        retain = bool(given.get("retain_graph", create))
        if self._places or create or "inputs" in given:
            targets = as_tuple(given["inputs"]) if "inputs" in given else None
            self._run(given, hooked, targets=targets, retain_graph=retain, create_graph=create)
            return None
        roots, gradients = as_tuple(given["tensors"]), given.get("grad_tensors")
        leaves = session.segment.leaves(session.replaying)
        with self._pass(roots):
            computed, order = session.call(
                "backward", backward_without_hooks, (roots, gradients, leaves),
                {"retain_graph": retain},
            )  # fmt: skip
            with session, torch.no_grad():
                self._accumulate([(leaves[i], computed[i]) for i in order], hooked)
        return None

    def _accumulate(
        self, arrived: Sequence[tuple[Tensor, Any]], hooked: dict[Tensor, Tables]
    ) -> None:
        """Accumulates gradients in the order in which they have arrived, with the hooks."""
        waiting: list[tuple[Tensor, Any]] = []
        for leaf, gradient in (*arrived, (None, None)):
            if leaf is not None and leaf not in hooked:
                waiting.append((leaf, gradient))
                continue
            if waiting:
                leaves, gradients = zip(*waiting, strict=True)
                accumulate(leaves, gradients)
                waiting.clear()
            if leaf is not None:
                call_hooks(leaf, gradient, of_node=hooked[leaf])

    def gradients(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follows `torch.autograd.grad`, and calls the hooks in it."""
        session = self._session
        if self._is_anomaly_detected():
            return func(*args, **kwargs)
        given = options_of(func, args, kwargs)
        inputs = as_tuple(given["inputs"])
        hooked: dict[Tensor, Tables] = {
            x: ({}, {}) for x in inputs if isinstance(x, Tensor) and x.is_leaf and is_hooked(x)
        }
        if not hooked and not self._places:
            return session.call("call", func, args, kwargs)
        if not self._is_followed(given):
            return func(*args, **kwargs)
        create = bool(given.get("create_graph"))
        retain = bool(given.get("retain_graph", create))
        found = self._run(given, hooked, captures=inputs, retain_graph=retain, create_graph=create)
        with session:
            return checked_gradients(found, inputs, given)

    def _is_anomaly_detected(self) -> bool:
        if torch.is_anomaly_enabled():
            self._session.go_eager("looks for anomalies in its backward pass")
        return torch.is_anomaly_enabled()

    def _is_followed(self, given: dict[str, Any]) -> bool:
        if not are_tensors(given) or self.is_in_region:
            self._session.go_eager("has hooks in its backward pass")
            return False
        return True

    def _run(
        self,
        given: dict[str, Any],
        hooked: dict[Tensor, Tables],
        captures: tuple[Tensor, ...] | None = None,
        targets: tuple[Tensor, ...] | None = None,
        *,
        retain_graph: bool,
        create_graph: bool,
    ) -> Gradients:
        """Runs a pass; see `tape.begin`. Returns the gradients that were asked for."""
        roots = as_tuple(given["tensors"])
        gradients = as_tuple(given.get("grad_tensors", (None,) * len(roots)))
        leaves, is_accumulated = tuple(hooked), captures is None
        ends = targets if is_accumulated else captures
        with (
            self._pass(roots, ends, is_divided=True, create_graph=create_graph) as depth,
            self._session,
            torch.set_grad_enabled(create_graph),
        ):
            number, arrived = begin(
                depth, roots, gradients, leaves, captures, targets,
                retain_graph=retain_graph, create_graph=create_graph,
            )  # fmt: skip
            while number != DONE:
                if number < DONE:
                    leaf = leaves[leaf_number(number)]
                    reply = call_hooks(leaf, arrived[0], is_accumulated, hooked[leaf])
                else:
                    reply = self._answer(number, arrived, frees=not retain_graph)
                number, arrived = proceed(depth, reply)
        return arrived

    def _answer(self, number: int, arrived: Gradients, frees: bool = False) -> Any:
        place = self._places[number]
        reply = place(arrived)
        if frees and isinstance(place, FunctionPlace):
            place.context.free()
        return reply

    def release(self) -> None:
        """The step goes on in eager: autograd's own engine calls user code from now on."""
        tape = current_tape()
        tape.answers = self._answer
        for place, (node, i) in zip(self._places, tape.places, strict=True):
            if isinstance(place, NodeHookPlace):
                register_on(node, place)
            elif isinstance(place, RetainedPlace):
                tensor = self.segment.real(place.tensor)
                if tensor is not None and not tensor.retains_grad:
                    tensor.retain_grad()
            elif isinstance(place, HookPlace):
                tensor = None if place.tensor is None else self.segment.real(place.tensor)
                if tensor is not None and tensor.grad_fn is node and tensor.output_nr == i:
                    tensor.register_hook(lambda gradient, place=place: place((gradient,))[0])
                else:
                    node.register_prehook(on_input(place, i))
