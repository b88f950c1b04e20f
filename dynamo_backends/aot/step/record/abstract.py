"""Abstract evaluation: new calls of a step are recorded on fake tensors, and not executed.

On a mesh a step cannot be taken in eager. So already the first call of a function is a replay: it
gets placeholders, and each call that no record has is added to the trie. Its metadata come from
fake tensors, which a `Recorder` takes for real ones.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import FakeTensorMode, is_parameter
from dynamo_backends._torch_private.tracing import NEEDS_CONTENTS
from dynamo_backends.aot.step.backward.checkpoints import must_stop
from dynamo_backends.aot.step.backward.tape import Tape, change_tape, current_tape
from dynamo_backends.aot.step.record.interpreter import execute
from dynamo_backends.aot.step.record.placeholders import TensorSpec
from dynamo_backends.aot.step.record.recorder import Recorder, UnrecordableCallError
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.templates import NotRecordable, template_of
from dynamo_backends.aot.step.record.trie import Entry, Trie, TrieNode, torch_state
from dynamo_backends.aot.step.source_lines import name_of
from dynamo_backends.runtime.device_tensor import handle_of

line = Recorder.line


class FakeSegment(Segment):
    """The fake tensors of a segment: a recorder takes them for the real ones."""

    def __init__(self, trie: Trie):
        super().__init__(trie, {})
        self.tensors: dict[int, Tensor] = {}

    def real(self, number: int) -> Tensor | None:
        """Returns the fake tensor of a placeholder; None if there is none."""
        return self.tensors.get(number)

    def note(self, number: int, fake: Tensor) -> Tensor:
        """Takes a fake tensor for that of a number."""
        self.tensors[number] = fake
        super()._note(number, fake)
        return fake

    def _note(self, number: int, tensor: Tensor) -> int:
        self.note(number, tensor)
        return number


class AbstractRecorder:
    """Records the calls of a step on fake tensors."""

    def __init__(self, session: Any):
        self._session = session
        self._recorder = Recorder(self)
        self._mode = FakeTensorMode()
        self.segment = FakeSegment(Trie())

    def release(self) -> None:
        """Forgets the fake tensors, whose mode refers to the real ones."""
        self._mode = FakeTensorMode()
        self.segment = FakeSegment(Trie())

    # What the recorder asks of a session

    def go_eager(self, reason: str) -> None:
        """Raises an error: on a mesh nothing runs in eager.

        Raises:
            Refusal: Always.
        """
        raise UnrecordableCallError(reason)

    def after_read(self, node: TrieNode) -> None:
        """The session reads the value itself."""

    def data(self, result: Any) -> Any:
        """See `Session.data`."""
        return self._session.data(result)

    def record(
        self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[TrieNode | None, Any]:
        """Adds a call to the record.

        Returns:
            The place behind it; None, and the result, for a call that is part of no record.

        Raises:
            Refusal: No record can hold it.
        """
        has_tensors = any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs)))
        if not has_tensors and not _is_recordable(args, kwargs):
            self._recorder.natives.add(func)
            return None, self.data(func(*args, **kwargs))
        self._follow()
        before = self.segment.node
        given, named = pytree.tree_map_only(Tensor, self._fake, (args, kwargs))
        if kind == "read":
            templates = [template_of(x, self.segment.ref) for x in (tuple(given), dict(named))]
            entry = Entry(kind, func, templates[0], templates[1], None, torch_state(), line())
            self.segment.node = self.segment.trie.append(before, entry, before.history)
        else:
            with contextlib.nullcontext() if kind == "mark" else self._mode:
                try:
                    result = self._recorder.record(kind, func, given, named)
                except NEEDS_CONTENTS:
                    text = f"calls {name_of(func)}, whose result depends on tensor values"
                    raise UnrecordableCallError(text) from None
            if self.segment.node is before:
                return None, result
        node = self.segment.node
        if kind == "get_grad":
            self._set_gradient(node, func(*args))
        node.stops = kind not in ("mark", "read") and must_stop(torch_state(), current_tape())
        return node, None

    def record_optimizer(
        self, kind: str, optimizer: Any, args: Any, kwargs: Any, settings: Any
    ) -> TrieNode:
        """Adds a call of an optimizer to the record; see `Recorder.record_optimizer`."""
        self._follow()
        segment, parent = self.segment, self.segment.node
        args = pytree.tree_map_only(Tensor, self._fake, tuple(args))
        given = [template_of(x, segment.ref) for x in (args, dict(kwargs))]
        function = kind, optimizer, settings
        entry = Entry(kind, function, given[0], given[1], None, torch_state(), line(), mutates=True)
        if kind == "zero_grad" and (*args, *kwargs.values(), True)[0]:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [segment.ref(self._fake(p)).value for p in parameters]
            entry.gradients.update(dict.fromkeys(numbers))
            self._clear(numbers)
        segment.node = segment.trie.append(parent, entry, parent.history)
        return segment.node

    def _set_gradient(self, node: TrieNode, gradient: Tensor) -> None:
        """Notes that a gradient that was there before is a real tensor."""
        assert node.entry is not None
        (number,) = node.entry.gradients.values()
        assert number is not None
        self.segment.trie.specs[number] = TensorSpec.of(gradient)

    def _clear(self, numbers: Any) -> None:
        for number in numbers:
            self.segment.tensors[number].grad = None

    # Fake tensors

    def _follow(self) -> None:
        """Goes to the place where the session is."""
        segment = self._session.segment
        if self.segment.trie is not segment.trie:
            self.segment = FakeSegment(segment.trie)
        if self.segment.node is not segment.node:
            self._catch_up(segment)

    def _catch_up(self, segment: Segment) -> None:
        """Runs the calls so far, of which the records knew."""
        trie, node = segment.trie, segment.node
        self.segment = FakeSegment(trie)
        self.segment.node = node
        change_tape(Tape())
        for number in sorted(node.known):
            if trie.kinds[number] in ("slot", "input") or number in trie.batch:
                self._add(number, trie.values[number])
        tensors: dict[int, Any] = dict(self.segment.tensors)
        with self._mode:
            for entry in node.path():
                if entry.kind == "zero_grad":
                    self._clear(n for n in entry.gradients if n in tensors)
                elif entry.kind == "get_grad":
                    ((target, of_target),) = entry.gradients.items()
                    assert of_target is not None
                    tensors[of_target] = tensors[target].grad
                elif entry.kind != "optimizer":
                    execute([entry], tensors, trie.numbers.__getitem__, tuple(entry.made))
        for number, fake in tensors.items():
            if number not in self.segment.tensors and isinstance(fake, Tensor):
                self.segment.note(number, fake)

    def _fake(self, tensor: Tensor) -> Tensor:
        """Returns the fake tensor of a placeholder, of what lives on, or of an input."""
        session = self._session.segment
        trie, number = session.trie, session.number_of(tensor)
        if number is None and session.lives_on(tensor):
            number = trie.slot(tensor)
        if number is None:
            if not tensor.is_leaf:
                raise UnrecordableCallError(
                    "uses a non-leaf tensor whose autograd graph was created before the step"
                )
            number = trie.add(TensorSpec.of(tensor), "input")
            session.bind(number, tensor)
        fake = self.segment.tensors.get(number)
        return self._add(number, tensor) if fake is None else fake

    def _add(self, number: int, tensor: Tensor) -> Tensor:
        spec = self.segment.trie.specs[number]
        with torch.no_grad():
            if self.segment.trie.kinds[number] == "result":  # of the whole batch
                with self._mode:
                    fake = torch.empty(spec.size, dtype=spec.dtype, device=spec.device)
            else:
                fake = fake_of(self._mode, tensor)
                if tensor.grad is not None:
                    fake.grad = fake_of(self._mode, tensor.grad)
        return self.segment.note(number, fake)


def _is_recordable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("generator") is not None:
        return False
    try:
        template_of((tuple(args), dict(kwargs)), _no_tensor)
    except NotRecordable:
        return False
    return True


def _no_tensor(tensor: Tensor) -> Any:
    raise NotRecordable("a tensor")


def fake_of(mode: FakeTensorMode, real: Tensor) -> Tensor:
    """Returns what stands in for a tensor: one of the CPU for what lives on a device."""
    handle = handle_of(real)
    fake = mode.from_tensor(handle, static_shapes=True)
    if handle is not real:
        fake.requires_grad_(real.requires_grad)
        fake._is_param = is_parameter(real)
    return fake
