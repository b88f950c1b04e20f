"""One call of a step: follows its torch calls through the records, and records what is new."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private.checkpoints import StopRecomputation
from dynamo_backends._torch_private.placeholders import (
    function_mode_depth,
    pop_function_mode,
    push_function_mode,
)
from dynamo_backends.aot.step.replay import functions
from dynamo_backends.aot.step.replay.abstract import AbstractRecorder
from dynamo_backends.aot.step.replay.checkpoints import must_stop, outside_regions
from dynamo_backends.aot.step.replay.comparisons import (
    NO_COMPARISON,
    Comparison,
    comparison_of,
)
from dynamo_backends.aot.step.replay.handlers import HANDLERS, native
from dynamo_backends.aot.step.replay.nested import NestedPasses
from dynamo_backends.aot.step.replay.recorder import Recorder, Refusal
from dynamo_backends.aot.step.replay.segment import Segment
from dynamo_backends.aot.step.replay.settings import OptimizerSettings
from dynamo_backends.aot.step.replay.tape import current_tape
from dynamo_backends.aot.step.replay.templates import Items, differing_numbers, fill, refs
from dynamo_backends.aot.step.replay.transforms import TransformedCalls
from dynamo_backends.aot.step.replay.trie import VARYING, Node, Trie, torch_state


class Runner(Protocol):
    """Runs what was recorded."""

    def commit(self, segment: Segment) -> bool:
        """Runs the calls of a segment as a program; False if only eager can."""

    def evaluate(self, segment: Segment, numbers: Sequence[int]) -> dict[int, Tensor] | None:
        """Computes a few tensors of a segment and changes nothing; None if only eager can."""

    def materialize(self, segment: Segment) -> None:
        """Runs the calls of a segment in eager."""

    def refuse(self, reason: str, line: str) -> None:
        """Notes that a part of the step runs in eager, or raises."""

    def note_value(self, func: Any, line: Callable[[], str]) -> None:
        """Python has asked for the contents of a tensor, or for what is outside of the record."""


class Session(TorchFunctionMode):
    """One call of a step.

    Args:
        trie: The records of the step.
        lives: Ids of the tensors that live from step to step.
        runner: Runs what was recorded.
        settings: Of the optimizers, by their ids.
        is_abstract: New calls are recorded without being executed (see `abstract`).
        arguments: Of the step, if it is spread over a mesh.

    Attributes:
        segment: The calls since the last cut.
        replaying: Whether calls are compared and not executed.
        following: Whether calls are compared or recorded at all.
        executed: Whether anything was computed call by call.
        divergence: The line at which the call went another way than all records.
        cuts: How many cuts there were.
        collecting: Whether Python collects garbage: finalizers may call torch, too.
    """

    def __init__(
        self,
        trie: Trie,
        lives: dict[int, Any],
        runner: Runner,
        settings: dict[int, OptimizerSettings],
        is_abstract: bool = False,
        arguments: Any = (),
    ):
        super().__init__()
        self._arguments = arguments
        self._abstract = AbstractRecorder(self) if is_abstract else None
        self._settings = settings
        self._lives = lives
        self._runner = runner
        self._recorder = Recorder(self)
        self.cuts = 0
        self.executed = False
        self.divergence = ""
        self.following = True
        self.collecting = False
        self._busy = False
        self.nested = NestedPasses(self)
        self.transforms = TransformedCalls(self)
        self._depth = 0
        self._begin(trie)

    @property
    def is_active(self) -> bool:
        """Whether torch calls are followed now."""
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

    @contextlib.contextmanager
    def own_calls(self) -> Iterator[None]:
        """Inside, outside of a handled call: torch calls are ours, not the step's."""
        with self._as_busy(True), outside_regions():
            yield

    @contextlib.contextmanager
    def _as_busy(self, busy: bool) -> Iterator[None]:
        before, self._busy = self._busy, busy
        try:
            yield
        finally:
            self._busy = before

    def handled_elsewhere(self) -> contextlib.AbstractContextManager[None]:
        """Inside: torch functions do not reach the record; the operators below them do."""
        return self._as_busy(True)

    def handled_here(self) -> contextlib.AbstractContextManager[None]:
        """Inside: a call reaches the record again."""
        return self._as_busy(False)

    def _begin(self, trie: Trie) -> None:
        """Begins a segment, at the first call and behind each cut."""
        trie.renew(trie.inputs)
        before: Segment | None = self.segment if self.executed else None
        self.segment: Segment = Segment(trie, self._lives, before)
        self.segment.arguments = self._arguments
        self.nested.renew()
        self.replaying = bool(trie.root.children) or self._abstract is not None

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
        return func(*args, **kwargs) if handler is native else handler(self, func, args, kwargs)

    def _unwrap(self) -> None:
        if not self.transforms.is_open:
            with self.own_calls():
                self.segment.unwrap()

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
                if func in self._recorder.natives and not _has_tensors(args, kwargs):
                    return self.data(func(*args, **kwargs))
                node = self._diverged(kind, func, args, kwargs)
            if node is None and self._abstract is not None:
                try:
                    node, result = self._abstract.record(kind, func, args, kwargs)
                except Refusal as refusal:
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
        except Refusal as refusal:
            self.go_eager(str(refusal))
            return func(*args, **kwargs)
        if kind != "mark" and must_stop(torch_state(), current_tape()):
            self.segment.node.stops = True
            raise StopRecomputation
        return result

    def share_memory(self, a: Tensor, b: Tensor) -> bool:
        """Returns whether two tensors of the step share memory."""
        with self.own_calls():
            return self.segment.memory_of(a) == self.segment.memory_of(b)

    def data(self, result: Any) -> Any:
        """Notes, and returns, what a call has made of Python's data."""
        trie = self.segment.trie
        if not trie.made_at and isinstance(result, Tensor):
            trie.made_at = self._recorder.line()
        return result

    def note_read(self, func: Any) -> None:
        """Python reads a tensor that no call has had."""
        self.note_value(func)
        trie = self.segment.trie
        if not trie.read_at:
            trie.read_at = self._recorder.line()

    def _match(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node | None:
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
            if is_plain and not (entry.flags or entry.gradients or child.stops):
                node.following = comparison_of(self.segment.trie, child)
        return node.following

    def _diverged(
        self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Node | None:
        """Where a call differs from the record in numbers only: these become inputs."""
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

    def _result(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    def _gradients_are_as(self, node: Node) -> bool:
        """Whether gradients that the record says nothing of are there as they were."""
        entry, values = node.entry, self.segment.trie.values
        assert entry is not None
        absent = map(_gradient, [values[n] for n in entry.absent])
        present = map(_gradient, [values[n] for n in entry.present])
        return all(map(operator.is_, absent, _NONES)) and all(map(operator.is_not, present, _NONES))

    def optimizer(
        self, kind: str, optimizer: Any, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        """Compares a call of an optimizer's method with the record, or records it.

        Args:
            kind: "optimizer" (its `step`) or "zero_grad".
            optimizer: The optimizer.
            args: Arguments of the call.
            kwargs: Keyword arguments.
            run: Executes it in eager.
        """
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
            self._cut("takes another step of an optimizer whose numbers have changed")
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

    # Cuts

    def _read(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Python needs a value in the middle of a replay."""
        with self.own_calls():
            return self._read_suspended(node, args, kwargs)

    def _read_suspended(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry, segment = node.entry, self.segment
        assert entry is not None
        self.note_value(entry.function)
        self.cuts += 1
        if not self._has_history(replaying=True):
            if self._commit():
                self._begin(_then(node))
            else:
                self._go_on_recording()
                self.following = False
                self.executed = True
            return entry.function(*args, **kwargs)
        wanted = [*refs(entry.args), *refs(entry.kwargs)]
        tensors = self._runner.evaluate(segment, wanted)
        if tensors is None:
            self.leave_record()
            self.nested.release()
            self.following = False
            return entry.function(*args, **kwargs)
        segment.node = node
        numbers = segment.trie.numbers
        filled = [
            fill(t, tensors.__getitem__, numbers.__getitem__) for t in (entry.args, entry.kwargs)
        ]
        result = entry.function(*filled[0], **filled[1])
        if not isinstance(result, str) or entry.function is not Tensor.__repr__:
            return result
        history = self.nested.name_of_history(wanted[0])
        return _with_history(result, history or segment.trie.specs[wanted[0]].history)

    def _has_history(self, replaying: bool) -> bool:
        nested = self.nested
        is_open = nested.is_open or nested.is_in_region or self.transforms.holds_tensors
        return is_open or self.segment.has_history(replaying)

    def note_value(self, func: Any) -> None:
        """Tells the runner of a function that lets Python depend on contents of tensors."""
        self._runner.note_value(func, self._recorder.line)

    def after_read(self, node: Node) -> None:
        """A value was read while the step is recorded."""
        assert node.entry is not None
        self.note_value(node.entry.function)
        self.cuts += 1
        if not self._has_history(replaying=False):
            self._begin(_then(node))

    def cut(self, name: str) -> None:
        """Before something that needs all that comes before it done."""
        with self.own_calls():
            self._cut(name)

    def _cut(self, name: str) -> None:
        segment = self.segment
        self.note_value(name)
        self.cuts += 1
        if segment.node is segment.trie.root:
            return
        if self._has_history(self.replaying):
            self._go_eager(name)
        elif not self.replaying or self._commit():
            self._begin(_then(segment.node))
        else:
            self._go_on_recording()
            self.following = False

    def leave_record(self) -> None:
        """The step goes on in another way than the records: runs the calls so far in eager."""
        self.divergence = self._recorder.line()
        with self.own_calls():
            self._runner.materialize(self.segment)
        self.executed = True
        self._go_on_recording()

    def _go_on_recording(self) -> None:
        self.replaying = False
        if self.segment.node.refusal is not None:
            self.following = False

    def go_eager(self, reason: str) -> None:
        """From here on the step runs in eager, up to its end."""
        with self.own_calls():
            self._go_eager(reason)

    def _go_eager(self, reason: str) -> None:
        self._runner.refuse(reason, self._recorder.line())
        if self.replaying:
            self.leave_record()
        if self.following:
            self.nested.release()
        self.following = False
        self.executed = True

    def _commit(self) -> bool:
        self.nested.renew()  # no backward pass may follow, and nobody holds what it would need
        if self._abstract is not None:
            self._abstract.release()
        return self._runner.commit(self.segment)

    def finish(self) -> None:
        """The function has returned: runs what is left to be run."""
        is_open = self.segment.node is not self.segment.trie.root
        if self.following and self.replaying and is_open and not self._commit():
            self.executed = True
        self._unwrap()
        self.nested.renew()
        self.following = False

    def catch_up(self) -> None:
        """The function has raised an exception: after a cut, all before it happens as in eager.

        Raises:
            Exception: One of the calls before it, which eager would have raised first.
        """
        is_open = self.segment.node is not self.segment.trie.root
        if self.cuts and is_open and self.following and self.replaying and self._abstract is None:
            with self.own_calls():
                self._runner.materialize(self.segment)
            self.executed = True
            self._go_on_recording()

    def abandon(self) -> None:
        """The function has raised an exception: nothing of this segment is run."""
        self.nested.renew()
        if self.following and self.replaying:
            self.segment.abandon()
        self.following = False


_gradient = operator.attrgetter("grad")
_NONES = itertools.repeat(None)


def _then(node: Node) -> Trie:
    if node.then is None:
        entry = node.entry
        is_read = entry is not None and entry.kind == "read"
        node.then = Trie(entry.line if entry is not None and is_read else Recorder.line())
    return node.then


def _has_tensors(args: Any, kwargs: Any) -> bool:
    return any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs)))


def _may_change(func: Any, template: Any, place: tuple[int, ...]) -> bool:
    for index in place:
        template = template.items[index]
    is_arithmetic = type(template) is float or func in functions.ARITHMETIC
    return is_arithmetic or functions.takes_tensor(func, place)


def _with_history(text: str, node: str) -> str:
    return f"{text[:-1]}, grad_fn=<{node}>)" if node and "grad_fn" not in text else text
