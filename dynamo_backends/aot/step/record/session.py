"""One call of a step: follows its torch calls through the records, and records what is new."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private.autograd_nodes import StopRecomputation
from dynamo_backends._torch_private.pending_tensors import (
    function_mode_depth,
    pop_function_mode,
    push_function_mode,
)
from dynamo_backends.aot.step.backward.checkpoints import must_stop
from dynamo_backends.aot.step.backward.tape import current_tape, resume_backward
from dynamo_backends.aot.step.record.abstract import AbstractRecorder
from dynamo_backends.aot.step.record.argument_matching import (
    NO_COMPARISON,
    Comparison,
    comparison_of,
)
from dynamo_backends.aot.step.record.backward_passes import NestedPasses
from dynamo_backends.aot.step.record.cuts import Segments
from dynamo_backends.aot.step.record.handlers import (
    ARITHMETIC,
    HANDLERS,
    call_unrecorded,
    takes_tensor,
)
from dynamo_backends.aot.step.record.recorder import Recorder, UnrecordableCallError
from dynamo_backends.aot.step.record.templates import Items, differing_numbers
from dynamo_backends.aot.step.record.transforms import TransformedCalls
from dynamo_backends.aot.step.record.trie import VARYING, Trie, TrieNode, torch_state
from dynamo_backends.aot.step.state.hyperparameters import OptimizerSettings


class Session(Segments, TorchFunctionMode):
    """One call of a step.

    Args:
        trie: The records of the step.
        lives: Ids of the tensors that live from step to step.
        runner: Runs what was recorded: a `SegmentRunner`.
        settings: Settings of the optimizers, by their ids.
        is_abstract: New calls are recorded without being executed (see `abstract`).
        arguments: Arguments of the step, if it is spread over a mesh.

    Attributes:
        transforms: Those of `torch.func` that are open.
        collecting: Whether Python collects garbage: finalizers may call torch, too.
    """

    def __init__(
        self,
        trie: Trie,
        lives: dict[int, Any],
        runner: Any,
        settings: dict[int, OptimizerSettings],
        is_abstract: bool = False,
        arguments: Any = (),
    ):
        TorchFunctionMode.__init__(self)
        self.transforms = TransformedCalls(self)
        Segments.__init__(
            self,
            lives,
            runner,
            Recorder(self),
            NestedPasses(self),
            AbstractRecorder(self) if is_abstract else None,
            arguments,
        )
        self._settings = settings
        self.collecting = False
        self._depth = 0
        self._begin(trie)

    @property
    def is_active(self) -> bool:
        """Returns whether torch calls are followed now."""
        return self.following and not self._busy and not self.collecting

    @property
    def is_active_or_in_region(self) -> bool:
        """Returns whether torch calls are followed, or part of a region that is recomputed."""
        return not (self._busy or self.collecting) and (self.following or self.nested.is_in_region)

    @property
    def is_innermost(self) -> bool:
        """Returns whether this is the mode that torch calls reach first."""
        return function_mode_depth() == self._depth

    def __enter__(self) -> "Session":
        """From here on torch calls reach this mode."""
        self._depth = function_mode_depth() + 1
        push_function_mode(self)
        return self

    def handled_elsewhere(self) -> contextlib.AbstractContextManager[None]:
        """Inside: torch functions do not reach the record; the operators below them do."""
        return self._as_busy(True)

    def handled_here(self) -> contextlib.AbstractContextManager[None]:
        """Inside: a call reaches the record again."""
        return self._as_busy(False)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handles one torch call of the step."""
        if self._busy or self.collecting or not self.following:
            if self.transforms.is_open:
                self.transforms.note_function(func)
            elif self.segment.wrapped:
                self._unwrap()
            return func(*args, **(kwargs or {}))
        if self.replaying:
            segment = self.segment
            trie = segment.trie
            following = segment.node.following or self._find_following()
            function, compare, node, number, constants = following
            if (function is func or function == func) and compare(
                args, kwargs, trie.values, constants, segment
            ):
                segment.node = node
                if number < 0:
                    return trie.result(node)
                result = trie.values[number]
                return trie.value(number) if result is None else result
        if self.segment.wrapped:
            self._unwrap()
        handler = HANDLERS.get(func)
        kwargs = kwargs or {}
        if handler is None:
            return self.call("call", func, args, kwargs)
        return (
            func(*args, **kwargs)
            if handler is call_unrecorded
            else handler(self, func, args, kwargs)
        )

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside: torch calls do not reach this mode, nor those within it."""
        modes = []
        while function_mode_depth() >= self._depth:
            modes.append(pop_function_mode())
        try:
            yield
        finally:
            for mode in reversed(modes):
                push_function_mode(mode)

    @contextlib.contextmanager
    def innermost(self) -> Iterator[None]:
        """Inside: torch calls reach this mode first, also where it is handling one."""
        with self.aside():
            push_function_mode(self)
            try:
                yield
            finally:
                pop_function_mode()

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `__torch_function__`, from within torch's functions in Python."""
        pop_function_mode()
        try:
            return self.__torch_function__(func, (), args, kwargs)
        finally:
            push_function_mode(self)

    # Calls

    def call(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compares a call with the record, or records it."""
        if self.replaying:
            node = self._match(func, args, kwargs)
            if node is None:
                if func in self._recorder.natives and not any(
                    isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs))
                ):
                    return self.data(func(*args, **kwargs))
                node = self._diverged(kind, func, args, kwargs)
            if node is None and self._abstract is not None:
                try:
                    node, result = self._abstract.record(kind, func, args, kwargs)
                except UnrecordableCallError as refusal:
                    self.go_eager(str(refusal))
                    return func(*args, **kwargs)
                if node is None:
                    return result
            if node is not None:
                result = self._result(node, args, kwargs)
                if node.stops:
                    raise StopRecomputation
                return result
            self.leave_record()
        self.executed = True
        if not self.following:
            return func(*args, **kwargs)
        try:
            result = self._recorder.record(kind, func, args, kwargs)
        except UnrecordableCallError as refusal:
            self.go_eager(str(refusal))
            return func(*args, **kwargs)
        if kind != "mark" and must_stop(torch_state(), current_tape()):
            self.segment.node.stops = True
            raise StopRecomputation
        return result

    def _match(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrieNode | None:
        segment = self.segment
        trie, count = segment.trie, segment.inputs
        for child in segment.node.children:
            entry = child.entry
            assert entry is not None
            if entry.function == func:
                comparison = comparison_of(trie, child)
                if comparison[1](args, kwargs, trie.values, comparison[4], segment):
                    if entry.kind != "backward" or self._gradients_are_as(child):
                        return child
                    segment.unbind(count)
        return None

    def _find_following(self) -> Comparison:
        node = self.segment.node
        node.following = NO_COMPARISON
        if len(node.children) == 1:
            (child,) = node.children
            entry = child.entry
            assert entry is not None
            is_plain = entry.kind == "call" and entry.function not in HANDLERS
            is_plain |= entry.function is resume_backward and not (entry.absent or entry.present)
            if is_plain and not (entry.flags or entry.gradients or child.stops):
                node.following = comparison_of(self.segment.trie, child)
        return node.following

    def _diverged(
        self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TrieNode | None:
        """Returns where a call differs from the record in numbers only: these become inputs."""
        segment = self.segment
        for child in segment.node.children:
            entry = child.entry
            assert entry is not None
            if entry.function != func or entry.kind != kind or entry.state != torch_state():
                continue
            template = Items(tuple, (), (entry.args, entry.kwargs))
            places = differing_numbers(template, (args, kwargs), segment.matches)
            if places and all(_may_change(func, template, place) for place in places):
                segment.trie.promote(child, places)
                return self._match(func, args, kwargs)
        return None

    def _result(self, node: TrieNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        segment, entry = self.segment, node.entry
        assert entry is not None
        if entry.kind == "read" and entry.value is VARYING:
            return self._read(node, args, kwargs)
        segment.node = node
        if entry.kind == "read":
            return entry.value
        if entry.kind == "get_grad":
            (target, number), *_ = entry.gradients.items()
            assert number is not None
            gradient = segment.trie.values[target].grad
            if not segment.bind(number, gradient):
                segment.node = node.parent  # type: ignore[assignment]
                self.leave_record()
                return self.call(entry.kind, entry.function, args, kwargs)
        if entry.gradients:
            segment.gradients.update(entry.gradients)
        if entry.flags:
            segment.flags.update(entry.flags)
        return segment.trie.result(node)

    def _gradients_are_as(self, node: TrieNode) -> bool:
        """Returns whether gradients that the record says nothing of are there as they were."""
        entry, values = node.entry, self.segment.trie.values
        assert entry is not None
        absent = map(_gradient, [values[n] for n in entry.absent])
        present = map(_gradient, [values[n] for n in entry.present])
        return all(map(operator.is_, absent, _NONES)) and all(map(operator.is_not, present, _NONES))

    def optimizer(
        self, kind: str, optimizer: Any, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        """Compares a call of an optimizer's method with the record, or records it."""
        self._busy = True
        try:
            return self._optimizer(kind, optimizer, args, kwargs, run)
        finally:
            self._busy = False

    def _optimizer(self, kind: str, optimizer: Any, args: Any, kwargs: Any, run: Any) -> Any:
        constants, numbers = self._settings[id(optimizer)].read()
        constants = constants if kind == "optimizer" else ()
        before = self.segment.numbers.get(id(optimizer), numbers)
        if kind == "optimizer" and before != numbers:
            self._cut("calls optimizer.step() again after the optimizer's settings changed")
            if not self.following:
                return run()
        if self.replaying:
            node = self._match((kind, optimizer, constants), args, kwargs)
            if node is None and self._abstract is not None:
                node = self._abstract.record_optimizer(kind, optimizer, args, kwargs, constants)
            if node is not None:
                if kind == "optimizer":
                    self.segment.numbers[id(optimizer)] = numbers
                return self._result(node, args, kwargs)
            self.leave_record()
            if not self.following:
                return run()
        self.executed = True
        if kind == "optimizer":
            self.segment.numbers[id(optimizer)] = numbers
        return self._recorder.record_optimizer(kind, optimizer, args, kwargs, run, constants)


_gradient = operator.attrgetter("grad")
_NONES = itertools.repeat(None)


def _may_change(func: Any, template: Any, place: tuple[int, ...]) -> bool:
    for index in place:
        template = template.items[index]
    is_arithmetic = type(template) is float or func in ARITHMETIC
    return is_arithmetic or takes_tensor(func, place)
