"""A compiled step whose Python stops running: `compile_step(..., python="frozen")`.

The function runs until two calls of the same kind, one after the other, have done the same: the
same torch calls, numbers and tensors from elsewhere, and the same result but for its contents. From
then on such a call runs the program alone. What differs from call to call is refused.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.frozen_calls import (
    FrozenCall,
    NotComparable,
    Result,
    Source,
    add_to_call_key,
)
from dynamo_backends.aot.step.program.copies import restoring_on_error
from dynamo_backends.aot.step.program.record_program import RecordProgram
from dynamo_backends.aot.step.program.step_programs import MAX_PROGRAMS, MAX_VARIANTS
from dynamo_backends.aot.step.program.straight_line import numbers_in
from dynamo_backends.aot.step.record.placeholders import is_placeholder
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.session import Session
from dynamo_backends.aot.step.record.trie import (
    Entry,
    Trie,
    TrieNode,
    process_state,
    torch_state,
)
from dynamo_backends.aot.step.source_lines import name_of
from dynamo_backends.aot.step.state.arguments import shared_memory
from dynamo_backends.aot.step.step import Step
from dynamo_backends.interface.errors import SaveError, StepCaptureError
from dynamo_backends.runtime.cache import LRU
from dynamo_backends.runtime.index_checks import OutOfRangeError

log = logging.getLogger("dynamo_backends")

ATTEMPTS = 8
"""How often the function may run for calls of one kind before these have to be alike."""

_COPIED = 1 << 16
"""Largest number of elements of a tensor that the function makes at each call."""


@dataclass
class _Observation:
    """The record, inputs and result of a call whose Python ran.

    Attributes:
        trie: Trie of its record.
        node: Where the record ended.
        result: What it returned.
        inputs: Where the inputs of the record came from, by their numbers.
        copies: Contents of tensors from elsewhere as they were, of small ones.
        with_gradient: Ids of the tensors among the arguments, and from elsewhere, with gradients.
        numbers: Numbers of the optimizers.
        line: The line of a result that Python keeps and does not return; empty: there is none.
        program: What has run.
        values: The numbers in Python that are inputs of the program, by their places in the trie.
    """

    trie: Trie
    node: TrieNode
    result: Result
    inputs: dict[int, Source]
    copies: dict[int, Tensor]
    with_gradient: set[int]
    numbers: list[Any]
    line: str
    program: RecordProgram | None = None
    values: dict[int, Any] = field(default_factory=dict)

    def difference(self, other: "_Observation") -> str:
        """Returns what another call has done in another way, besides numbers of optimizers."""
        if self.node is not other.node or self.trie is not other.trie:
            return "takes a different code path at each call"
        for index, value in self.values.items():
            if index not in other.values or repr(other.values[index]) != repr(value):
                line = self._line_of(numbers_in, index)
                return f"uses a Python scalar that changes from call to call at {line}"
        for number, source in self.inputs.items():
            if not self._is_same(number, source, other):
                line = self._line_of(Entry.mentioned, number)
                return f"uses a different tensor at each call at {line}"
        if not self.result.is_like(other.result):
            return "returns a different result structure at each call"
        return ""

    def _is_same(self, number: int, source: Source, other: "_Observation") -> bool:
        before = other.inputs.get(number)
        if before is None or before.kind != source.kind:
            return False
        if source.kind != "constant":
            return bool(before.value == source.value)
        if before.value is source.value:
            return True
        ours, theirs = self.copies.get(number), other.copies.get(number)
        return ours is not None and theirs is not None and torch.equal(ours, theirs)

    def _line_of(self, numbers: Callable[[Entry], set[int]], number: int) -> str:
        return next(entry.line for entry in self.node.path() if number in numbers(entry))

    def sources(self, before: "_Observation", state: Sequence[Tensor]) -> dict[int, Source]:
        """Finds the sources of tensors that are no results of calls, by their numbers.

        Args:
            before: The state before a call that has done the same.
            state: What lives on.
        """
        sources = {}
        for number, source in self.inputs.items():
            if source.kind == "constant" and before.inputs[number].value is not source.value:
                source = Source("constant", self.copies[number], is_fresh=True)
            sources[number] = source
        positions = {id(x): i for i, x in enumerate(state)}
        for number, tensor in enumerate(self.trie.values):
            if self.trie.kinds[number] == "slot" and id(tensor) in positions:
                sources[number] = Source("state", positions[id(tensor)])
        return sources


class _Kind:
    """The calls with equal arguments, but for the contents of tensors, in one state of torch.

    Attributes:
        calls: Those in which Python does not run; that of the last call comes first.
        runs: How often Python has run, and has done something else than the time before.
        before: The last of these, if it can be compared.
        free: Which numbers of optimizers have been others, and nothing else was.
        reason: Why Python runs, for people.
    """

    def __init__(self) -> None:
        self.calls: list[FrozenCall] = []
        self.runs = 0
        self.before: _Observation | None = None
        self.free: set[int] = set()
        self.reason = "takes a different code path at each call"


class FrozenStep(Step):
    """A compiled training step; the function runs for the first calls of each kind.

    Attributes:
        frozen_calls: How many calls there were in which it did not run.
    """

    def __init__(self, definition: Any, backend: str, options: Any, fallback: str):
        super().__init__(definition, backend, options, fallback)
        self.frozen_calls = 0
        self._kinds: LRU[Any, _Kind] = LRU(MAX_VARIANTS)
        self._arguments: list[Tensor] = []
        self._observation: _Observation | None = None
        self._modules: list[dict[str, Any]] = []
        self._modules_of: Any = None

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments: list[Tensor] = []
        kind = self._kind(args, kwargs, arguments)
        if kind is None:
            return super()._call(args, kwargs)
        if not self._state.ids.keys().isdisjoint(map(id, arguments)):
            self._refuse_call("gets a parameter or other persistent tensor as an argument")
            return super()._call(args, kwargs)
        for i, call in enumerate(kind.calls):
            try:
                result = call(arguments, self._state.inventory)
            except OutOfRangeError:
                return super()._call(args, kwargs)  # which raises eager's error
            if result is not None:
                self.frozen_calls += 1
                if i:
                    kind.calls.insert(0, kind.calls.pop(i))
                return result[0]
        return self._observe(kind, arguments, args, kwargs)

    def _kind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: list[Tensor]
    ) -> _Kind | None:
        parts: list[Any] = [process_state(), torch_state(), self._flags_of_modules()]
        try:
            add_to_call_key(args, arguments, parts)
            if kwargs:
                add_to_call_key(kwargs, arguments, parts)
            parts.append(shared_memory(arguments))
            key = tuple(parts)
            kind = self._kinds.get(key)
        except (NotComparable, TypeError) as error:
            self._refuse_call(f"gets an argument that cannot be compared ({error})")
            return None
        if kind is None:
            kind = _Kind()
            self._kinds.put(key, kind)
        return kind

    def _flags_of_modules(self) -> Any:
        """Returns the training flags of all modules."""
        if self._modules_of is not self._state.inventory:
            self._modules_of = self._state.inventory
            modules = (m for model in self._definition.models for m in model.modules())
            self._modules = [vars(m) for m in modules if "training" in vars(m)]
        return tuple(map(_training, self._modules))

    # Calls in which Python runs

    def _observe(
        self, kind: _Kind, arguments: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the function, and notes what it does."""
        if kind.runs == ATTEMPTS:
            self._refuse_call(kind.reason)
        kind.runs += 1
        self._arguments, self._observation = arguments, None
        before = self._read_settings()
        try:
            with self._first_calls_whole():
                result = super()._call(args, kwargs)
            now = self._observation
            if now is None:
                kind.before = None
            elif self._read_settings() != before:
                kind.before = None
                kind.reason = (
                    "changes an optimizer setting, for example through a learning rate scheduler"
                )
            elif now.program is not None:
                self._compare(kind, now)
            else:
                kind.runs = 0  # a program that is compared with eager, or slower
        finally:
            self._arguments, self._observation, self._last = [], None, None
            for trie in self._programs.tries.values():
                trie.renew(trie.inputs)  # or the last arguments would live on
        return result

    def _read_settings(self) -> list[Any]:
        return [each.read() for each in self._settings.values()]

    def _compare(self, kind: _Kind, now: _Observation) -> None:
        """From here on Python does not run for a kind of calls, if two have done the same."""
        assert now.program is not None
        now.values = {i: now.trie.numbers[i] for i in now.program.calls.places}
        before, kind.before = kind.before, now
        if before is None:
            return
        kind.reason = now.difference(before) or kind.reason
        if now.difference(before):
            return
        kind.runs = 0
        pairs = zip(before.numbers, now.numbers, strict=True)
        kind.free.update(i for i, (a, b) in enumerate(pairs) if type(a) is type(b) and a != b)
        if now.line:
            log.warning(
                'A step stores a tensor in a Python object at %s. With python="frozen" Python does '
                "not run again, so the stored tensor is not updated. Return the tensor, or pass "
                'python="replay".', now.line,
            )  # fmt: skip
        sources = now.sources(before, self._state.inventory.tensors)
        call = FrozenCall(
            now.program, now.trie, sources, list(now.values.values()), now.result,
            list(self._settings.values()), kind.free, self._arguments, now.with_gradient,
        )  # fmt: skip
        kind.calls = [call, *kind.calls][:MAX_PROGRAMS]

    @contextlib.contextmanager
    def _first_calls_whole(self) -> Iterator[None]:
        """Inside: if a first call is refused, nothing has changed."""
        if self.launches or not self._programs.raises:
            yield
            return
        states = [(o.state, dict(o.state)) for o in self._definition.optimizers]
        try:
            with restoring_on_error(self._state.inventory.tensors):
                yield
        except BaseException:
            for state, before in states:
                state.clear()
                state.update(before)
            raise

    def _before_programs(self, session: Session, result: Any) -> None:
        """See `Step`: the results are placeholders, and all contents are as they were."""
        is_alike = session.following and session.replaying and not session.executed
        segment = session.segment
        if not is_alike or session.cuts or segment.node is segment.trie.root:
            return
        session.nested.renew()  # saved tensors are nobody's any more
        returned: set[int | None] = set()

        def source_of_result(tensor: Tensor) -> Source:
            returned.add(segment.number_of(tensor))
            return self._source(segment, tensor)

        try:
            result = Result(result, source_of_result)
        except NotComparable as error:
            self._refuse_call(f"returns an object that cannot be reconstructed ({error})")
            return
        inputs = {n: self._source(segment, x) for n, x in segment.bound.items()}
        others = {n: s.value for n, s in inputs.items() if s.kind == "constant"}
        left = set(segment.held()) - returned
        given = (*self._arguments, *others.values())
        self._observation = _Observation(
            segment.trie, segment.node, result, inputs,
            {n: x.detach().clone() for n, x in others.items() if x.numel() <= _COPIED},
            {id(x) for x in given if x.is_leaf and x.grad is not None},
            [number for each in self._settings.values() for number in each.read()[1]],
            next((e.line for e in segment.node.path() if not left.isdisjoint(e.made)), ""),
        )  # fmt: skip

    def _source(self, segment: Segment, tensor: Tensor) -> Source:
        """Finds the source of a tensor that the function returns, or of an input of its record."""
        if is_placeholder(tensor):
            number = segment.number_of(tensor)
            owners = {n: owner for owner, n in segment.gradients.items()}
            if number not in owners:
                return Source("output", number)
            owner = self._source(segment, segment.trie.values[owners[number]])
            if owner.kind != "state":
                raise NotComparable("the gradient of an argument")
            return Source("gradient", owner.value)
        for kind, several in (
            ("argument", self._arguments),
            ("state", self._state.inventory.tensors),
        ):
            for i, each in enumerate(several):
                if each is tensor:
                    return Source(kind, i)
        return Source("constant", tensor)

    def _run(self, program: RecordProgram, segment: Segment) -> dict[int, Tensor] | None:
        tensors = super()._run(program, segment)
        if self._observation is not None and tensors is not None:
            self._observation.program = program
        return tensors

    def _forget_programs(self) -> None:
        super()._forget_programs()
        for kind in self._kinds.values():
            kind.calls.clear()
            kind.runs = 0

    def snapshot(self) -> Any:
        """Refuses to save the step.

        Raises:
            SaveError: Always.
        """
        raise SaveError('a step with python="frozen" cannot be saved. Pass python="replay".')

    # Refusals

    def note_value(self, func: Any, line: Callable[[], str]) -> None:
        """See `SegmentRunner.note_value`."""
        name = (
            func
            if isinstance(func, str)
            else (f"needs the value of a tensor in Python ({name_of(func)})")
        )
        self._refuse_call(f"{name} at {line()}")

    def _refuse_call(self, reason: str) -> None:
        text = f'the step {reason}, but with python="frozen" Python does not run at each call'
        if self._programs.raises:
            raise StepCaptureError(f'{text}. Pass python="replay".')
        if reason not in self.refusals:
            log.warning(
                '%s. Python runs at these calls. Pass python="replay" to remove this warning.',
                text[0].upper() + text[1:],
            )
        self.refusals[reason] = reason


_training = itemgetter("training")
