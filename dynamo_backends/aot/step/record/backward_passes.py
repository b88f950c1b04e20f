"""Backward passes with user code in them, in a session: they stop where it has its turn.

A pass is a few calls of the record, `begin_backward` and `resume_backward`, and between them the
calls of hooks and of backwards of `autograd.Function`. In eager and in a trace `engine.py` runs the
parts; in a replay the record says where the next place of user code is.
"""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dynamo_backends._torch_private import saved_tensors_hooks
from dynamo_backends._torch_private.autograd_nodes import NO_TASK, graph_task, is_accumulation
from dynamo_backends.aot.step.backward import hooks, tape
from dynamo_backends.aot.step.backward.checkpoints import (
    GeneratorState,
    RecomputeCallback,
    SavedTensors,
    is_of_region,
    save_in_region,
)
from dynamo_backends.aot.step.backward.engine import DONE
from dynamo_backends.aot.step.backward.hooks import Gradients, Tables
from dynamo_backends.aot.step.backward.tape import GraphNode, Tape
from dynamo_backends.aot.step.record.autograd_functions import Context, FunctionBackwardCallback


@dataclass
class OpenPass:
    """A backward pass that has begun.

    Attributes:
        task: What `torch._C._current_graph_task_id` tells hooks of it.
        roots: Where it begins.
        ends: What gradients are asked for; None: those of all leaves.
        callbacks: What is called when it is over.
    """

    task: int
    roots: tuple[Tensor, ...]
    ends: tuple[Tensor, ...] | None
    callbacks: list[Callable[[], Any]] = field(default_factory=list)


_TASKS = itertools.count(1 << 40)  # those of autograd's own engine are small


class NestedPasses:
    """The places of user code in the backward passes of a segment."""

    def __init__(self, session: Any):
        self.session = session
        self._open: list[OpenPass] = []
        self._places: list[Callable[[Gradients], Any]] = []
        self._contexts: dict[int, Context] = {}
        self._nodes: dict[int, GraphNode] = {}
        self._states = 0
        self._regions: list[tuple[RecomputeCallback, bool]] = []

    def renew(self) -> None:
        """Begins a new segment of the record."""
        self._places = []
        self._contexts = {}
        self._nodes = {}
        self._states = 0
        if not tape.current_tape().is_new:
            before = tape.change_tape(Tape())
            if before.answers is None:
                before.clear()

    @property
    def is_open(self) -> bool:
        """Returns whether a backward pass has begun, and is not over."""
        return bool(self._open)

    # Autograd nodes, and what hooks ask of the pass that calls them

    def node_of(self, tensor: Tensor) -> GraphNode:
        """Returns the autograd node of a result with a history."""
        with self.session:
            return self.graph_node(*tape.find_node(tensor))

    def graph_node(self, number: int, name: str) -> GraphNode:
        """Returns the stand-in for the autograd node of a result."""
        if number not in self._nodes:
            self._nodes[number] = tape.graph_node(self, number, name)
        return self._nodes[number]

    def context_at(self, number: int) -> Context:
        """Returns the node that is user code and has a place."""
        place = self._places[number]
        assert isinstance(place, FunctionBackwardCallback)
        return place.context

    def add_node_hook(self, number: int, hook: Any, is_before: bool) -> RemovableHandle:
        """Registers a hook on an autograd node."""
        count = tape.mark_node(number, is_before)
        place = hooks.NodeHookCallback(OrderedDict(), None if is_before else count)
        self._places.append(place)
        return hooks.register(hook, place.hooks)

    @property
    def task(self) -> int:
        """The number of the pass that is running; `NO_TASK`: there is none."""
        task = graph_task()
        return self._open[-1].task if task == NO_TASK and self._open else task

    @property
    def depth(self) -> int:
        """Returns the nesting depth of the running pass; -1 if torch's own engine runs it."""
        return len(self._open) - 1 if graph_task() == NO_TASK else -1

    def queue_callback(self, callback: Callable[[], Any]) -> None:
        """Has something called when the pass is over."""
        self._open[-1].callbacks.append(callback)

    def asks_for(self, node: Any) -> bool:
        """Returns whether the pass calls a node."""
        this = self._open[-1]
        if isinstance(node, GraphNode):
            return not node.is_past and tape.backward_reaches_node(
                this.roots, this.ends, node.number
            )
        for number, place in enumerate(self._places):
            if isinstance(place, FunctionBackwardCallback) and place.context is node:
                return tape.backward_reaches_node(this.roots, this.ends, -1 - number)
        if not is_accumulation(node):
            return False
        number, _ = tape.find_node(node.variable)
        return tape.backward_reaches_node(this.roots, this.ends, number)

    @contextlib.contextmanager
    def _pass(
        self,
        roots: tuple[Tensor, ...],
        ends: tuple[Tensor, ...] | None,
        *,
        create_graph: bool,
    ) -> Iterator[int]:
        """Inside: a backward pass runs; yields how many others it is part of."""
        depth = self.depth + 1
        this = OpenPass(next(_TASKS), roots, ends)
        self._open.append(this)
        try:
            yield depth
            if this.callbacks:
                with self.session, torch.set_grad_enabled(create_graph):
                    for callback in this.callbacks:  # which may add others
                        callback()
        finally:
            self._open.pop()

    def context_of(self, tensor: Tensor) -> Context | None:
        """Returns the node that is user code and has made a tensor."""
        number = self.session.segment.number_of(tensor) if self._contexts else None
        return None if number is None else self._contexts.get(number)

    def name_of_history(self, number: int) -> str:
        """Returns the name of such a node, by the number of the tensor; empty if there is none."""
        context = self._contexts.get(number)
        return "" if context is None else context.name()

    def add_function(self, place: FunctionBackwardCallback, outputs: Sequence[Tensor]) -> None:
        """Adds what `tape.attach` has made a place of."""
        self._places.append(place)
        segment = self.session.segment
        for output in outputs:
            number = segment.number_of(output)
            if number is not None:
                self._contexts[number] = place.context

    @property
    def next_place(self) -> int:
        """The number of the place that is added next."""
        return len(self._places)

    def next_state(self) -> GeneratorState:
        """Returns what stands for the state of torch's generator that has just been kept."""
        self._states += 1
        return GeneratorState(self._states - 1)

    @property
    def is_in_region(self) -> bool:
        """Returns whether calls are part of a checkpointed region."""
        saved = saved_tensors_hooks()
        return saved is not None and is_of_region(saved)

    @contextlib.contextmanager
    def in_region(self, place: RecomputeCallback, is_second: bool) -> Iterator[None]:
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

    def add_region(self, place: RecomputeCallback) -> None:
        """Adds what `checkpoints.open_region` has made a place of."""
        self._places.append(place)

    def add_hook(self, tensor: Tensor, hook: Any) -> RemovableHandle:
        """Registers a hook on a result."""
        with self.session:
            tape.mark_hooked_result(tensor)
        place = hooks.TensorHookCallback(self.session.segment.number_of(tensor), OrderedDict())
        self._places.append(place)
        return hooks.register(hook, place.hooks)

    def retain(self, tensor: Tensor) -> None:
        """Has the gradient of a result become its attribute."""
        if self.retains(tensor):
            return
        with self.session:
            tape.mark_retained_grad(tensor)
        number = self.session.segment.number_of(tensor)
        assert number is not None
        self._places.append(hooks.RetainGradCallback(number, self._find))

    def _find(self, number: int) -> Tensor | None:
        if self.session.replaying:
            return self.session.segment.trie.value(number)
        return self.session.segment.real(number)

    def retains(self, tensor: Tensor) -> bool:
        """Returns whether the gradient of a result becomes its attribute."""
        number = self.session.segment.number_of(tensor)
        retained = (p.tensor for p in self._places if isinstance(p, hooks.RetainGradCallback))
        return number is not None and number in retained

    # Passes

    def backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follows a backward pass that accumulates gradients, and calls the hooks in it."""
        session = self.session
        if self._is_anomaly_detected():
            return func(*args, **kwargs)
        hooked = session.segment.hooked_leaves(session.replaying)
        if not hooked and not self._places:
            return session.call("backward", func, args, kwargs)
        given = hooks.options_of(func, args, kwargs)
        if func is Tensor.backward and "inputs" in given:
            with session:  # which checks them, and makes a tuple of a dictionary
                return torch.autograd.backward(**given)
        if not self._is_followed(given):
            return func(*args, **kwargs)
        create = bool(given.get("create_graph"))
        retain = bool(given.get("retain_graph", create))
        targets = hooks.as_tuple(given["inputs"]) if "inputs" in given else None
        self._run(given, hooked, targets=targets, retain_graph=retain, create_graph=create)
        return None

    def gradients(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follows `torch.autograd.grad`, and calls the hooks in it."""
        session = self.session
        if self._is_anomaly_detected():
            return func(*args, **kwargs)
        given = hooks.options_of(func, args, kwargs)
        inputs = hooks.as_tuple(given["inputs"])
        hooked: dict[Tensor, Tables] = {
            x: ({}, {})
            for x in inputs
            if isinstance(x, Tensor) and x.is_leaf and hooks.is_hooked(x)
        }
        if not hooked and not self._places:
            return session.call("call", func, args, kwargs)
        if not self._is_followed(given):
            return func(*args, **kwargs)
        create = bool(given.get("create_graph"))
        retain = bool(given.get("retain_graph", create))
        found = self._run(given, hooked, captures=inputs, retain_graph=retain, create_graph=create)
        with session:
            return hooks.checked_gradients(found, inputs, given)

    def _is_anomaly_detected(self) -> bool:
        if torch.is_anomaly_enabled():
            self.session.go_eager("uses anomaly detection in its backward pass")
        return torch.is_anomaly_enabled()

    def _is_followed(self, given: dict[str, Any]) -> bool:
        if not hooks.are_tensors(given) or self.is_in_region:
            self.session.go_eager("has hooks in its backward pass")
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
        roots = hooks.as_tuple(given["tensors"])
        gradients = hooks.as_tuple(given.get("grad_tensors", (None,) * len(roots)))
        leaves, is_accumulated = tuple(hooked), captures is None
        ends = targets if is_accumulated else captures
        with (
            self._pass(roots, ends, create_graph=create_graph) as depth,
            self.session,
            torch.set_grad_enabled(create_graph),
        ):
            number, arrived = tape.begin_backward(
                depth, roots, gradients, leaves, captures, targets,
                retain_graph=retain_graph, create_graph=create_graph,
            )  # fmt: skip
            while number != DONE:
                if number < DONE:
                    leaf = leaves[tape.leaf_number(number)]
                    reply = hooks.call_hooks(leaf, arrived[0], is_accumulated, hooked[leaf])
                else:
                    reply = self._answer(number, arrived, frees=not retain_graph)
                number, arrived = tape.resume_backward(depth, reply)
        return arrived

    def _answer(self, number: int, arrived: Gradients, frees: bool = False) -> Any:
        place = self._places[number]
        reply = place(arrived)
        if frees and isinstance(place, FunctionBackwardCallback):
            place.context.free()
        return reply

    def release(self) -> None:
        """The step goes on in eager: autograd's own engine calls user code from now on."""
        run_tape = tape.current_tape()
        run_tape.answers = self._answer
        for place, (node, i) in zip(self._places, run_tape.places, strict=True):
            if isinstance(place, hooks.NodeHookCallback):
                place.register_on(node)
            elif isinstance(place, hooks.RetainGradCallback):
                tensor = self.session.segment.real(place.tensor)
                if tensor is not None and not tensor.retains_grad:
                    tensor.retain_grad()
            elif isinstance(place, hooks.TensorHookCallback):
                tensor = None if place.tensor is None else self.session.segment.real(place.tensor)
                if tensor is not None and tensor.grad_fn is node and tensor.output_nr == i:
                    tensor.register_hook(lambda gradient, place=place: place((gradient,))[0])
                else:
                    node.register_prehook(hooks.as_node_prehook(place, i))
