"""The segments of one call of a step: how each begins, and how it ends."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dynamo_backends.aot.step.backward.checkpoints import disabling_region_hooks
from dynamo_backends.aot.step.record.abstract import AbstractRecorder
from dynamo_backends.aot.step.record.backward_passes import NestedPasses
from dynamo_backends.aot.step.record.recorder import Recorder
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.templates import fill, refs
from dynamo_backends.aot.step.record.transforms import TransformedCalls
from dynamo_backends.aot.step.record.trie import Trie, TrieNode


class Segments:
    """The segments of one call of a step.

    Args:
        lives: Ids of the tensors that live from step to step.
        runner: Runs what was recorded: a `SegmentRunner`.
        recorder: Executes new calls.
        nested: The backward passes with user code in them.
        abstract: Records new calls without executing them, if that is wanted.
        arguments: Arguments of the step, if it is spread over a mesh.

    Attributes:
        segment: The calls since the last cut.
        replaying: Whether calls are compared and not executed.
        following: Whether calls are compared or recorded at all.
        executed: Whether anything was computed call by call.
        divergence: The line at which the call went another way than all records.
        cuts: How many cuts there were.
        nested: The backward passes with user code in them.
    """

    transforms: TransformedCalls

    def __init__(
        self,
        lives: dict[int, Any],
        runner: Any,
        recorder: Recorder,
        nested: NestedPasses,
        abstract: AbstractRecorder | None,
        arguments: Any,
    ):
        self._lives = lives
        self._runner = runner
        self._recorder = recorder
        self.nested = nested
        self._abstract = abstract
        self._arguments = arguments
        self.cuts = 0
        self.executed = False
        self.divergence = ""
        self.following = True
        self._busy = False

    def _begin(self, trie: Trie) -> None:
        """Begins a segment, at the first call and behind each cut."""
        trie.renew(trie.inputs)
        before: Segment | None = self.segment if self.executed else None
        self.segment: Segment = Segment(trie, self._lives, before)
        self.segment.arguments = self._arguments
        self.nested.renew()
        self.replaying = bool(trie.root.children) or self._abstract is not None

    @contextlib.contextmanager
    def own_calls(self) -> Iterator[None]:
        """Inside, outside of a handled call: torch calls are ours, not the step's."""
        with self._as_busy(True), disabling_region_hooks():
            yield

    @contextlib.contextmanager
    def _as_busy(self, busy: bool) -> Iterator[None]:
        before, self._busy = self._busy, busy
        try:
            yield
        finally:
            self._busy = before

    def _unwrap(self) -> None:
        if not self.transforms.is_open:
            with self.own_calls():
                self.segment.unwrap()

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

    def _read(self, node: TrieNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Python needs a value in the middle of a replay."""
        with self.own_calls():
            return self._read_suspended(node, args, kwargs)

    def _read_suspended(self, node: TrieNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry, segment = node.entry, self.segment
        assert entry is not None
        self.note_value(entry.function)
        self.cuts += 1
        if not self._has_history(replaying=True):
            if self._commit():
                self._begin(_then(node))
            else:
                self.replaying = False
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
        node_name = history or segment.trie.specs[wanted[0]].history
        is_named = not node_name or "grad_fn" in result
        return result if is_named else f"{result[:-1]}, grad_fn=<{node_name}>)"

    def _has_history(self, replaying: bool) -> bool:
        nested = self.nested
        is_open = nested.is_open or nested.is_in_region or self.transforms.holds_tensors
        return is_open or self.segment.has_history(replaying)

    def note_value(self, func: Any) -> None:
        """Tells the runner of a function that lets Python depend on contents of tensors."""
        self._runner.note_value(func, self._recorder.line)

    def after_read(self, node: TrieNode) -> None:
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
            self.replaying = False
            self.following = False

    def leave_record(self) -> None:
        """The step goes on in another way than the records: runs the calls so far in eager."""
        self.divergence = self._recorder.line()
        with self.own_calls():
            self._runner.materialize(self.segment)
        self.executed = True
        self.replaying = False

    def go_eager(self, reason: str) -> None:
        """From here on the step runs in eager, up to its end, unless it does so already."""
        if self.following:
            with self.own_calls():
                self._go_eager(reason)

    def _go_eager(self, reason: str) -> None:
        self._runner.refuse(reason, self._recorder.line())
        if self.replaying:
            self.leave_record()
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
            self.replaying = False

    def abandon(self) -> None:
        """The function has raised an exception: nothing of this segment is run."""
        self.nested.renew()
        if self.following and self.replaying:
            self.segment.abandon()
        self.following = False


def _then(node: TrieNode) -> Trie:
    if node.then is None:
        entry = node.entry
        is_read = entry is not None and entry.kind == "read"
        node.then = Trie(entry.line if entry is not None and is_read else Recorder.line())
    return node.then
