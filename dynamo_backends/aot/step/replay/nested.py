"""Backward passes with user code in them, in a session: they stop where it has its turn.

A pass is a few calls of the record, `begin` and `proceed`, and between them the calls of hooks and
of backwards of `autograd.Function`. In eager and in a trace `engine.py` runs the parts; in a replay
the record says where the next place of user code is.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dynamo_backends._torch_private import saved_tensors_hooks
from dynamo_backends.aot.step.replay.backward import (
    are_tensors,
    as_tuple,
    backward_without_hooks,
    call_hooks,
    checked_gradients,
    hook_gradient,
    is_hooked,
    needs_engine,
    options_of,
)
from dynamo_backends.aot.step.replay.checkpoints import CheckpointPlace, is_of_region
from dynamo_backends.aot.step.replay.engine import DONE
from dynamo_backends.aot.step.replay.generator_states import GeneratorState
from dynamo_backends.aot.step.replay.tape import (
    Tape,
    begin,
    change_tape,
    current_tape,
    leaf_number,
    mark,
    proceed,
)
from dynamo_backends.aot.step.replay.user_functions import Context, FunctionPlace, Gradients


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


class NestedPasses:
    """The places of user code in the backward passes of a segment.

    Args:
        session: The call of the step.
    """

    def __init__(self, session: Any):
        self._session = session
        self._depth = 0
        self._places: list[Callable[[Gradients], Any]] = []
        self._contexts: dict[int, Context] = {}
        self._states = 0

    def renew(self) -> None:
        """A segment begins."""
        self._places = []
        self._contexts = {}
        self._states = 0
        if not current_tape().is_new:
            before = change_tape(Tape())
            if before.answers is None:
                before.clear()

    @property
    def is_open(self) -> bool:
        """Whether a backward pass has begun, and is not over."""
        return self._depth > 0

    def context_of(self, tensor: Tensor) -> Context | None:
        """The node that is user code and has made a tensor."""
        number = self._session.segment.number_of(tensor) if self._contexts else None
        return None if number is None else self._contexts.get(number)

    def name_of_history(self, number: int) -> str:
        """The name of such a node, by the number of the tensor; empty if there is none."""
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
        """Whether calls are part of a checkpointed region."""
        hooks = saved_tensors_hooks()
        return hooks is not None and is_of_region(hooks)

    @staticmethod
    def count_saved(tensors: Sequence[Tensor]) -> None:
        """Tells the region of tensors that a function saves: it saves them when it runs again."""
        pack, _ = saved_tensors_hooks()
        for tensor in tensors:
            pack(tensor)

    def add_region(self, place: CheckpointPlace) -> None:
        """Adds what `checkpoints.open_region` has made a place of."""
        self._places.append(place)

    def add_hook(self, tensor: Tensor, hook: Any) -> RemovableHandle:
        """Registers a hook on a result."""
        hooks: dict[int, Any] = OrderedDict()
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        with self._session:
            mark(tensor)
        self._places.append(HookPlace(self._session.segment.number_of(tensor), hooks))
        return handle

    # Passes

    def backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follows a backward pass that accumulates gradients, and calls the hooks in it."""
        session = self._session
        hooked = session.segment.hooked_leaves(session.replaying)
        if not hooked and not self._places:
            return session.call("backward", func, args, kwargs)
        given = options_of(func, args, kwargs)
        if not self._is_followed(given, hooked):
            return func(*args, **kwargs)
        create = bool(given.get("create_graph"))
        retain = bool(given.get("retain_graph", create))
        if self._places or create or "inputs" in given:
            targets = as_tuple(given["inputs"]) if "inputs" in given else None
            self._run(given, hooked, targets=targets, retain_graph=retain, create_graph=create)
            return None
        roots, gradients = given["tensors"], given.get("grad_tensors")
        computed, order = session.call(
            "backward", backward_without_hooks, (roots, gradients, hooked), {"retain_graph": retain}
        )
        with session, torch.no_grad():
            for i in order:
                call_hooks(hooked[i], computed[i])
        return None

    def gradients(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follows `torch.autograd.grad`, and calls the hooks in it."""
        session = self._session
        given = options_of(func, args, kwargs)
        inputs = as_tuple(given["inputs"])
        hooked = [x for x in inputs if isinstance(x, Tensor) and x.is_leaf and is_hooked(x)]
        if not hooked and not self._places:
            return session.call("call", func, args, kwargs)
        if not self._is_followed(given, hooked):
            return func(*args, **kwargs)
        create = bool(given.get("create_graph"))
        retain = bool(given.get("retain_graph", create))
        found = self._run(given, hooked, captures=inputs, retain_graph=retain, create_graph=create)
        with session:
            return checked_gradients(found, inputs, given)

    def _is_followed(self, given: dict[str, Any], hooked: Sequence[Tensor]) -> bool:
        if any(map(needs_engine, hooked)) or not are_tensors(given) or self.is_in_region:
            self._session.go_eager("has hooks in its backward pass")
            return False
        return True

    def _run(
        self,
        given: dict[str, Any],
        leaves: Sequence[Tensor],
        captures: tuple[Tensor, ...] | None = None,
        targets: tuple[Tensor, ...] | None = None,
        *,
        retain_graph: bool,
        create_graph: bool,
    ) -> Gradients:
        """Runs a pass; see `tape.begin`. Returns the gradients that were asked for."""
        roots = as_tuple(given["tensors"])
        gradients = as_tuple(given.get("grad_tensors", (None,) * len(roots)))
        depth = self._depth
        is_accumulated = captures is None
        self._depth += 1
        try:
            with self._session, torch.set_grad_enabled(create_graph):
                number, arrived = begin(
                    depth, roots, gradients, tuple(leaves), captures, targets,
                    retain_graph=retain_graph, create_graph=create_graph,
                )  # fmt: skip
                while number != DONE:
                    if number < DONE:
                        leaf = leaves[leaf_number(number)]
                        reply = call_hooks(leaf, arrived[0], is_accumulated)
                    else:
                        reply = self._answer(number, arrived, frees=not retain_graph)
                    number, arrived = proceed(depth, reply)
        finally:
            self._depth -= 1
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
            if isinstance(place, HookPlace):
                tensor = None
                if place.tensor is not None:
                    tensor = self._session.segment.real(place.tensor)
                if tensor is not None and tensor.grad_fn is node and tensor.output_nr == i:
                    tensor.register_hook(lambda gradient, place=place: place((gradient,))[0])
                else:
                    node.register_prehook(_on_input(place, i))


def _on_input(place: HookPlace, i: int) -> Callable[[Gradients], Gradients]:
    def hook(gradients: Gradients) -> Gradients:
        (gradient,) = place((gradients[i],))
        return (*gradients[:i], gradient, *gradients[i + 1 :])

    return hook
